"""Where the bags of a folder or file are, by the layouts that other tools write.

A layout is told by the names of folders and files, and by what the first files hold; every guess is said.
"""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from carmil.bags.arrays import (
    KINDS,
    Contents,
    groups_of,
    has_groups,
    hidden_line,
    kind_of,
    one_of,
    opened,
    rows_and_width,
    some,
    whole_numbers,
)
from carmil.bags.matrices import columns_of, instance_table, is_matrix, npz_matrix, one_line_a_row
from carmil.bags.names import TABLE, read_names
from carmil.bags.readers import COORDINATE_NAMES, FEATURE_NAMES, INSTANCE_LABEL_NAMES, written_by_stamp
from carmil.bags.sources import READERS, Found, Source
from carmil.errors import CarmilError
from carmil.untrusted import one_line_errors
from carmil.words import plural

BAG_COLUMNS = ("bag", "bag_name", "slide_id", "slide", "patient_id", "case_id")

_DEEPEST = 4  # folders below the given one in which features are looked for


def find_bags(path: Path, *, truth: str | None = None) -> Found:
    """Looks what layout `path` has, and where its bags are.

    truth: the column of instances.csv, or the array of the npz, that holds the truth about each instance.
    """
    path = Path(os.path.abspath(path))
    with one_line_errors(path):
        if not path.exists():
            raise CarmilError(f"{path} does not exist: expected a folder or a file of features")
        found = _by_own_reader(path) or (_find_in(path, truth) if path.is_dir() else _in_file(path, truth))
    if found is None:
        raise CarmilError(
            f"{path} holds no features: expected one file a slide ({', '.join(KINDS)}), or a folder as CLAM, TRIDENT, "
            "STAMP, torchmil or slideflow write it"
        )
    if truth is not None and not found.layout.startswith("matrix"):
        raise CarmilError(
            f"{path} has the layout {found.layout!r}, and {truth!r} names the truth in a matrix with instances.csv: "
            "leave it out"
        )
    _check_ids(path, found.sources)
    sources = _under_own_names(found.sources)
    _check_twice(path, sources)
    hidden = _hidden(sources) if path.is_dir() else ()
    if hidden:
        found = _also(found, hidden_line(hidden))
    return replace(found, sources=tuple(sorted(sources, key=lambda source: source.id)), hidden=hidden)


def _hidden(sources: Sequence[Source]) -> tuple[str, ...]:
    """Files of features beside these that begin with a dot; what carmil itself has not finished writing does not count."""
    folders = sorted({source.path.parent for source in sources})
    names = [path.name for folder in folders for path in folder.glob(".*") if kind_of(path) and path.is_file()]
    return tuple(sorted(name for name in names if not name.startswith(".carmil-")))


def _under_own_names(sources: Sequence[Source]) -> list[Source]:
    """Bags whose files could not have their names have them from the table beside (carmil.bags.names)."""
    names = {folder: read_names(folder) for folder in {source.path.parent for source in sources}}
    return [
        replace(source, id=names[source.path.parent].get(source.id, source.id))
        if source.id == source.path.stem
        else source
        for source in sources
    ]


def _by_own_reader(path: Path) -> Found | None:
    """By what was registered, the first that knows the folder."""
    for layout, reader in READERS.items():
        if bags := reader.find(path):
            sources = tuple(Source(name, Path(file), layout) for name, file in bags.items())
            return Found(sources, layout, (f"read as {layout}, a layout that was registered",))
    return None


def _find_in(folder: Path, truth: str | None, depth: int = 0, seen: frozenset[str] = frozenset()) -> Found | None:
    files, folders = _listed(folder)
    if folder.name.startswith("slide_features_"):
        raise _slide_level(folder)
    if "features.npy" in files and "instances.csv" in files:
        return _in_matrix(files["features.npy"], files["instances.csv"], truth)
    if "bags_config.json" in files or any(name.endswith((".index.npz", ".index.npy")) for name in files):
        return _by_slideflow(folder, files)
    for look in (_by_torchmil, _by_clam, _by_trident):
        if (found := look(folder, folders)) is not None:
            return found
    arrays = [path for path in files.values() if kind_of(path)]
    if len(arrays) == 1 and kind_of(arrays[0]) == "npz":
        return _in_file(arrays[0], truth)
    return _in_files(files) or _in_slide_folders(folders) or _one_below(folder, folders, truth, depth, seen)


def _in_slide_folders(folders: dict[str, Path]) -> Found | None:
    """One folder per slide, with a file that is called features (feats, ...) or like the folder: SLIDE/features.h5."""
    chosen, coords, others, spare = dict[str, Path](), dict[str, Path](), list[str](), set[str]()
    for slide, folder in folders.items():
        files, _ = _listed(folder)
        arrays = [path for path in files.values() if kind_of(path)]
        features = _features_of_slide(slide, folder, arrays)
        if "instances.csv" in files or "bags_config.json" in files:
            return None
        if features is None:
            others += [slide] if arrays else []
            continue
        chosen[slide] = features
        for path in arrays:
            if path.stem.casefold() in COORDINATE_NAMES and kind_of(features) != "h5":
                coords[slide] = path
            elif path != features:
                spare.add(path.name)
    look = _look(chosen.values())
    if len(chosen) <= len(others) or look.layout == "acmil" or any(_holds_many(path) for path in chosen.values()):
        return None
    said = ["one folder per slide: a slide has the name of its folder", *look.said]
    if coords:
        said.append("the files name no unit: coordinates are taken as level-0 pixels")
    if spare:
        said.append(f"left other files in the slides' folders aside: {some(sorted(spare))}")
    if others:
        said.append(
            f"WARNING: {plural(len(others), 'folder')} left aside, with files under other names: {some(others)}"
        )
    sources = tuple(
        Source(
            slide,
            path,
            look.layout if kind_of(path) == "h5" else str(kind_of(path)),
            (("coords", coords[slide]),) if slide in coords else (),
        )
        for slide, path in chosen.items()
    )
    return Found(sources, f"slide folders, {look.layout}", tuple(said))


def _features_of_slide(slide: str, folder: Path, arrays: Sequence[Path]) -> Path | None:
    """The file of features in a slide's folder. Of several kinds of the same the first is read: h5 has coordinates."""
    named = [path for path in arrays if path.stem.casefold() in FEATURE_NAMES]
    if not named:
        rest = [path for path in arrays if path.stem.casefold() not in COORDINATE_NAMES]
        named = rest if {path.stem for path in rest} == {slide} else []
    by_kind: dict[str | None, list[Path]] = {}
    for path in named:
        by_kind.setdefault(kind_of(path), []).append(path)
    best = next((by_kind[kind] for kind in KINDS.values() if kind in by_kind), [])
    if len(best) > 1:
        raise CarmilError(f"{folder} holds {some(path.name for path in best)}, all of them features: keep one of them")
    return best[0] if best else None


def _holds_many(path: Path) -> bool:
    """Whether a file holds the matrix of a whole cohort."""
    if kind_of(path) != "npz":
        return False
    with opened(path) as contents:
        return is_matrix(contents)


def _one_below(
    folder: Path, folders: dict[str, Path], truth: str | None, depth: int, seen: frozenset[str]
) -> Found | None:
    """The one folder below that holds features; links that lead in a circle are walked once."""
    here = os.path.realpath(folder)
    if depth == _DEEPEST or here in seen:
        return None
    below = {}
    for name, child in folders.items():
        if os.path.realpath(child) not in seen | {here}:
            found = _find_in(child, truth, depth + 1, seen | {here})
            if found is not None:
                below[name] = found
    if len(below) > 1:
        raise _several(folder, below)
    return next(
        (_also(found, f"read {name}: the one folder with features in {folder}") for name, found in below.items()), None
    )


def _in_file(path: Path, truth: str | None) -> Found | None:
    beside = path.parent / "instances.csv"
    if path.name == "features.npy" and beside.exists():
        return _in_matrix(path, beside, truth)
    if kind_of(path) == "npz":
        with opened(path) as contents:
            matrix = is_matrix(contents)
        if matrix:
            return _in_npz_matrix(path, truth)
    if kind_of(path) is None:
        return None
    whole = _find_in(path.parent, None) if path.parent.name in ("h5_files", "pt_files") else None
    if whole is not None:
        return replace(whole, sources=tuple(source for source in whole.sources if source.path == path), said=())
    return _in_files({path.name: path})


def _in_files(files: dict[str, Path], layout: str | None = None) -> Found | None:
    """One file a slide."""
    features = {name: path for name, path in files.items() if kind_of(path)}
    if not features:
        return None
    aside = sorted(set(files) - set(features))
    said = [f"left {plural(len(aside), 'file')} aside, no features: {some(aside)}"] if aside else []
    kinds = Counter(kind_of(path) for path in features.values())
    look = _look(features.values())
    if look.layout == "acmil":
        groups = [(path, *group) for path in features.values() if kind_of(path) == "h5" for group in groups_of(path)]
        return Found(
            tuple(Source(id, path, "acmil", (), id, label) for path, id, label in groups), "acmil", tuple(said)
        )
    sources = tuple(
        Source(
            path.name[: -len(path.suffix)],
            path,
            (layout or look.layout) if kind_of(path) == "h5" else str(kind_of(path)),
        )
        for path in features.values()
    )
    named = layout or "+".join(sorted(look.layout if kind == "h5" else str(kind) for kind in kinds))
    return Found(sources, named, (*said, *look.said))


@dataclass(frozen=True)
class _Look:
    layout: str
    said: tuple[str, ...] = ()


def _look(paths: Iterable[Path]) -> _Look:
    """Which tool wrote these files, by the first that can be opened; what is damaged is told when it is read."""
    for path in islice(paths, 3):
        try:
            with opened(path) as contents:
                return _look_into(contents)
        except CarmilError:
            continue
    return _Look("h5")


def _look_into(contents: Contents) -> _Look:
    layout, told = "h5", contents.told
    coordinates = next((name for name in COORDINATE_NAMES if name in contents.names), None)
    if written_by_stamp(contents):
        old = "old STAMP files without a unit: coordinates become micrometres as STAMP itself does it, times 256/224"
        return _Look("stamp", () if told("unit") is not None else (old,))
    if kind_of(contents.path) == "h5":
        if not set(contents.names) & {*FEATURE_NAMES, *COORDINATE_NAMES} and has_groups(contents.path):
            return _Look("acmil")
        if coordinates and contents.get(coordinates).told("patch_size_level0") is not None:
            layout = "trident"
    unit_told = coordinates and (told("unit") or told("coordinate_unit") or contents.get(coordinates).told("unit"))
    if coordinates and layout == "h5" and unit_told is None:
        return _Look(layout, ("the files name no unit: coordinates are taken as level-0 pixels",))
    return _Look(layout)


def _by_clam(folder: Path, folders: dict[str, Path]) -> Found | None:
    if folder.name in ("h5_files", "pt_files"):
        folders = {folder.name: folder}
    kinds = {name: _listed(folders[name])[0] for name in ("h5_files", "pt_files") if name in folders}
    kinds = {name: files for name, files in kinds.items() if any(kind_of(path) for path in files.values())}
    if not kinds:
        return None
    chosen, files = next(iter(kinds.items()))
    found = _in_files(files, "clam")
    assert found is not None
    named = {source.id for source in found.sources}
    rest = {name: path for name, path in kinds.get("pt_files", {}).items() if kind_of(path) and path.stem not in named}
    only = _in_files(rest, "clam")
    if only is not None:
        found = replace(found, sources=(*found.sources, *only.sources))
    home = folders[chosen].parent
    patches = [place for place in (home / "patches", home.parent / "patches") if place.is_dir()]
    sources = tuple(replace(source, layout="clam", companions=_patches(patches, source.id)) for source in found.sources)
    said = [sentence for sentence in found.said if "no unit" not in sentence]
    if len(kinds) == 2:
        said.append("read h5_files, not pt_files: they have coordinates")
    if only is not None:
        names = some(sorted(source.id for source in only.sources))
        said.append(f"read {plural(len(only.sources), 'slide')} from pt_files, not in h5_files: {names}")
    if without := [source.id for source in sources if not source.companions]:
        said.append(
            f"the size of a tile is unknown for {plural(len(without), 'slide')}: no file of patches was found beside"
        )
    return Found(sources, "clam", tuple(said))


def _patches(places: Sequence[Path], id: str) -> tuple[tuple[str, Path], ...]:
    return tuple(("patches", place / f"{id}.h5") for place in places if (place / f"{id}.h5").is_file())[:1]


def _by_trident(folder: Path, folders: dict[str, Path]) -> Found | None:
    if folder.name.startswith("features_"):
        return _in_files(_listed(folder)[0], "trident")
    jobs = [folders, *(_listed(path)[1] for name, path in folders.items() if "px_overlap" in name)]
    every = [path for job in jobs for path in job.values()]
    held = {path: _in_files(_listed(path)[0], "trident") for path in every if path.name.startswith("features_")}
    chosen = {str(path.relative_to(folder)): found for path, found in held.items() if found is not None}
    if len(chosen) > 1:
        raise _several(folder, chosen)
    if not chosen and (whole := [path for path in every if path.name.startswith("slide_features_")]):
        raise _slide_level(whole[0])
    return next((_also(found, f"read {name}") for name, found in chosen.items()), None)


def _by_torchmil(folder: Path, folders: dict[str, Path]) -> Found | None:
    features = None
    if folder.name.startswith("features_") and folder.parent.name == "features":
        features, folder = folder, folder.parent.parent
    elif folder.name == "features" and "features" not in folders:
        folder = folder.parent
    folders = _listed(folder)[1]
    beside = [name for name in ("labels", "inst_labels", "patch_labels", "coords") if name in folders]
    if "features" not in folders or not beside:
        return None
    features = features or _torchmil_features(folders["features"])
    found = _in_files(_listed(features)[0])
    if found is None:
        return None
    by_id: dict[str, dict[str, Path]] = {
        name: {path.stem: path for path in _listed(folders[name])[0].values() if kind_of(path)} for name in beside
    }
    sources = tuple(_torchmil_source(source, by_id) for source in found.sources)
    said = [sentence for sentence in found.said if "no unit" not in sentence]
    if "coords" in by_id:
        said.append("torchmil's files name no unit: coordinates are taken as level-0 pixels")
    return Found(sources, "torchmil", tuple(said))


def _torchmil_features(folder: Path) -> Path:
    files, folders = _listed(folder)
    if any(kind_of(path) for path in files.values()) or not folders:
        return folder
    if len(folders) > 1:
        raise _several(folder, folders)
    return next(iter(folders.values()))


def _torchmil_source(source: Source, by_id: dict[str, dict[str, Path]]) -> Source:
    companions, label = [], None
    if (coords := by_id.get("coords", {}).get(source.id)) is not None:
        companions.append(("coords", coords))
    for name in ("inst_labels", "patch_labels"):
        if (path := by_id.get(name, {}).get(source.id)) is not None:
            companions.append(("instance_labels", path))
            break
    if (path := by_id.get("labels", {}).get(source.id)) is not None:
        with opened(path) as contents:
            held = one_of(contents, ("labels", "label", "arr_0", ""))
            label = str(whole_numbers(held if held.shape else replace(held, shape=(1,)), 1)[0])
    elif companions and companions[-1][0] == "instance_labels":
        with opened(companions[-1][1]) as contents:
            held = one_of(contents, (*INSTANCE_LABEL_NAMES, "labels", "arr_0", ""))
            label = str(int((whole_numbers(held, max(held.shape, default=0)) > 0).any()))
    return replace(source, layout="torchmil", companions=tuple(companions), label=label)


def _by_slideflow(folder: Path, files: dict[str, Path]) -> Found | None:
    bags = {name: path for name, path in files.items() if kind_of(path) == "pt"}
    index = [name for name in files if name.endswith((".index.npz", ".index.npy"))]
    found = _in_files({name: path for name, path in files.items() if name not in (*index, "bags_config.json")})
    if found is None or not bags:
        return None
    config = (("config", files["bags_config.json"]),) if "bags_config.json" in files else ()
    sources = []
    for path in bags.values():
        places = (f"{path.stem}.index.npz", f"{path.stem}.index.npy")
        coords = tuple(("coords", files[name]) for name in places if name in files)[:1]
        sources.append(Source(path.stem, path, "slideflow", (*coords, *config)))
    said = "slideflow gives the centre of a tile in level-0 pixels, and not how large a tile is there"
    return Found(tuple(sources), "slideflow", (*(s for s in found.said if "no unit" not in s), said))


def _in_matrix(path: Path, csv: Path, truth: str | None) -> Found:
    columns = columns_of(csv)
    usable = [name for name in BAG_COLUMNS if name in columns]
    if not usable:
        raise CarmilError(
            f"{csv} says nothing of bags: expected a column {' or '.join(BAG_COLUMNS)}, found {some(columns)}"
        )
    table = instance_table(csv, usable[0], truth=truth)
    with opened(path) as contents:
        rows, _ = rows_and_width(contents.get(""))
    one_line_a_row(path, rows, table)
    companions = ((f"bag:{usable[0]}", csv), *(() if truth is None else ((f"truth:{truth}", csv),)))
    sources = tuple(
        Source(name, path, "matrix", companions, name, _any_positive(table.truth, of_bag))
        for name, of_bag in table.rows.items()
    )
    said = [f"a bag is a {usable[0]} of {csv.name}"]
    if usable[1:]:
        said[0] += f", which has {', '.join(usable[1:])} as well"
    return Found(sources, "matrix", tuple(said))


def _in_npz_matrix(path: Path, truth: str | None) -> Found:
    matrix = npz_matrix(path, truth)
    companions = () if truth is None else ((f"truth:{truth}", path),)
    sources = tuple(
        Source(
            name,
            path,
            "matrix_npz",
            companions,
            name,
            matrix.labels.get(name) or _any_positive(matrix.table.truth, rows),
        )
        for name, rows in matrix.table.rows.items()
    )
    return Found(sources, "matrix_npz", ())


def _any_positive(truth: np.ndarray | None, rows: np.ndarray) -> str | None:
    return None if truth is None else str(int((truth[rows] > 0).any()))


def _listed(folder: Path) -> tuple[dict[str, Path], dict[str, Path]]:
    """Files and folders by name, sorted; what starts with a dot is somebody's unfinished business."""
    with one_line_errors(folder):
        entries = sorted(
            (entry for entry in os.scandir(folder) if not entry.name.startswith(".") and entry.name != TABLE),
            key=lambda e: e.name,
        )
        folders = {entry.name: Path(entry.path) for entry in entries if os.path.isdir(entry.path)}
    return {entry.name: Path(entry.path) for entry in entries if entry.name not in folders}, folders


def _check_ids(path: Path, sources: Iterable[Source]) -> None:
    for source in sources:
        id = source.id
        if not id or not id.isprintable() or id in (".", "..") or "/" in id or len(id.encode()) > 255:
            shown = repr(id if len(id) <= 40 else f"{id[:40]}...")
            raise CarmilError(
                f"{path} has a bag named {shown}: expected up to 255 bytes without slashes or control characters, "
                "as the name of a slide has"
            )


def _check_twice(path: Path, sources: Iterable[Source]) -> None:
    first: dict[str, Source] = {}
    for source in sources:
        id = source.id
        if id in first:
            raise CarmilError(
                f"{path} has the bag {id!r} twice, in {first[id].path.name} and {source.path.name}: keep one of them"
            )
        first[id] = source


def _several(folder: Path, names: Iterable[str]) -> CarmilError:
    return CarmilError(
        f"{folder} holds features in several folders ({some(sorted(names))}): give the path of one of them"
    )


def _slide_level(folder: Path) -> CarmilError:
    return CarmilError(
        f"{folder} holds one vector for each slide, nothing of its tiles: give a features_ENCODER folder with tile features"
    )


def _also(found: Found, sentence: str) -> Found:
    return replace(found, said=(sentence, *found.said))
