"""Find the bags in a folder or file that another tool wrote.

A layout is recognised by the names of folders and files, and by the contents of the first files; every guess is
noted.
"""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from carmil.array_files import KINDS, ArrayFile, groups_of, kind_of, open_arrays, read_instance_labels
from carmil.bags.matrices import find_in_matrix, is_matrix
from carmil.bags.readers import COORDINATE_NAMES, FEATURE_NAMES, INSTANCE_LABEL_NAMES, written_by_stamp
from carmil.bags.sources import READERS, CohortFiles, Source
from carmil.errors import CarmilError
from carmil.recorded_names import NAMES_TABLE, read_names
from carmil.untrusted import one_line_errors
from carmil.words import examples, plural

_DEEPEST = 4  # levels of folders that are searched for features
_LEVEL0 = "coordinates are taken as level-0 pixels"
_NO_UNIT = f"the files name no unit: {_LEVEL0}"
_Files = dict[str, Path]


def find_bags(path: Path, *, truth: str | None = None) -> CohortFiles:
    """Recognise the layout of `path`, and list its bags.

    truth: the column of instances.csv, or the array of the npz, that holds the truth about each instance.
    """
    path = Path(os.path.abspath(path))
    with one_line_errors(path):
        if not path.exists():
            raise CarmilError(f"{path} does not exist: expected a folder or a file of features")
        cohort = _by_registered_reader(path) or (_in_folder(path, truth) if path.is_dir() else _in_file(path, truth))
    if cohort is None:
        raise CarmilError(
            f"{path} holds no features: expected one file per slide ({', '.join(KINDS)}), or a folder in the layout of "
            "CLAM, TRIDENT, STAMP, torchmil or slideflow"
        )
    if truth is not None and not cohort.layout.startswith("matrix"):
        raise CarmilError(
            f"{path} has the layout {cohort.layout!r}: the truth column {truth!r} is for a matrix with "
            "instances.csv only; leave it out"
        )
    _check_ids(path, cohort.sources)
    sources = _with_exported_names(cohort.sources)
    _check_unique(path, sources)
    hidden = _hidden_files(sources) if path.is_dir() else ()
    notes = (hidden_note(hidden), *cohort.notes) if hidden else cohort.notes
    return CohortFiles(tuple(sorted(sources, key=lambda source: source.id)), cohort.layout, notes, hidden)


def hidden_note(names: Sequence[str]) -> str:
    """One sentence about the files that are left out because their names begin with a dot."""
    begin = "name begins" if len(names) == 1 else "names begin"
    return f"{plural(len(names), 'hidden file')} left out, whose {begin} with a dot: {examples(names, 6)}"


def _hidden_files(sources: Sequence[Source]) -> tuple[str, ...]:
    """List feature files beside `sources` whose names begin with a dot, except those that carmil is still writing."""
    folders = sorted({source.path.parent for source in sources})
    names = [path.name for folder in folders for path in folder.glob(".*") if kind_of(path) and path.is_file()]
    return tuple(sorted(name for name in names if not name.startswith(".carmil-")))


def _with_exported_names(sources: Sequence[Source]) -> list[Source]:
    """Restore the ids of bags that carmil exported under other file names (see `carmil.recorded_names`)."""
    names = {folder: read_names(folder) for folder in {source.path.parent for source in sources}}
    return [
        replace(source, id=names[source.path.parent].get(source.id, source.id))
        if source.id == source.path.stem
        else source
        for source in sources
    ]


def _check_ids(path: Path, sources: Sequence[Source]) -> None:
    """Refuse names that no slide can have."""
    for id in (source.id for source in sources):
        if not id or not id.isprintable() or id in (".", "..") or "/" in id or len(id.encode()) > 255:
            name = repr(id if len(id) <= 40 else f"{id[:40]}...")
            raise CarmilError(
                f"{path} has a bag named {name}: expected up to 255 bytes without slashes or control characters, "
                "as the name of a slide has"
            )


def _check_unique(path: Path, sources: Sequence[Source]) -> None:
    first: dict[str, Source] = {}
    for source in sources:
        if (before := first.setdefault(source.id, source)) is not source:
            raise CarmilError(
                f"{path} has the bag {source.id!r} twice, in {before.path.name} and {source.path.name}: keep one of them"
            )


def _by_registered_reader(path: Path) -> CohortFiles | None:
    """Find the bags with the first registered reader that recognises the folder."""
    for layout, reader in READERS.items():
        if bags := reader.find(path):
            sources = tuple(Source(name, Path(file), layout) for name, file in bags.items())
            return CohortFiles(sources, layout, (f"read as {layout}, a registered layout",))
    return None


def _in_folder(
    folder: Path, truth: str | None, depth: int = 0, seen: frozenset[str] = frozenset()
) -> CohortFiles | None:
    files, folders = _list(folder)
    if folder.name.startswith("slide_features_"):
        raise _slide_level(folder)
    if "features.npy" in files and "instances.csv" in files:
        return find_in_matrix(files["features.npy"], truth)
    if "bags_config.json" in files or _slideflow_indices(files):
        return _by_slideflow(files)
    for find in (_by_torchmil, _by_clam, _by_trident):
        if (cohort := find(folder, folders)) is not None:
            return cohort
    arrays = [path for path in files.values() if kind_of(path)]
    if len(arrays) == 1 and kind_of(arrays[0]) == "npz":
        return _in_file(arrays[0], truth)
    return _in_files(files) or _in_slide_folders(folders) or _in_subfolder(folder, folders, truth, depth, seen)


def _in_slide_folders(folders: _Files) -> CohortFiles | None:
    """Find bags in one folder per slide, SLIDE/features.h5; the file has one of FEATURE_NAMES or the folder's name."""
    chosen, coords, others, unread = dict[str, Path](), dict[str, Path](), list[str](), set[str]()
    for slide, folder in folders.items():
        files, _ = _list(folder)
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
                unread.add(path.name)
    layout, layout_notes = _recognise(chosen.values())
    if len(chosen) <= len(others) or layout == "acmil" or any(_is_matrix_file(path) for path in chosen.values()):
        return None
    notes = ["one folder per slide: a slide has the name of its folder", *layout_notes]
    if coords:
        notes.append(_NO_UNIT)
    if unread:
        notes.append(f"other files in the folders of slides are not read: {examples(sorted(unread), 6)}")
    if others:
        left = plural(len(others), "folder with files of other names is", "folders with files of other names are")
        notes.append(f"WARNING: {left} left out: {examples(others, 6)}")
    sources = tuple(
        replace(_source(path, layout), id=slide, companions=(("coords", coords[slide]),) if slide in coords else ())
        for slide, path in chosen.items()
    )
    return CohortFiles(sources, f"slide folders, {layout}", tuple(notes))


def _features_of_slide(slide: str, folder: Path, arrays: Sequence[Path]) -> Path | None:
    """Find the feature file in the folder of a slide. If there are several kinds, h5 is preferred, as it has coordinates."""
    named = [path for path in arrays if path.stem.casefold() in FEATURE_NAMES]
    if not named:
        rest = [path for path in arrays if path.stem.casefold() not in COORDINATE_NAMES]
        named = rest if {path.stem for path in rest} == {slide} else []
    by_kind = ([path for path in named if kind_of(path) == kind] for kind in KINDS.values())
    best = next((paths for paths in by_kind if paths), [])
    if len(best) > 1:
        names = examples((path.name for path in best), 6)
        raise CarmilError(f"{folder} holds {names}, all with features: keep one of them")
    return best[0] if best else None


def _is_matrix_file(path: Path) -> bool:
    """Return whether a file holds the matrix of a whole cohort."""
    if kind_of(path) != "npz":
        return False
    with open_arrays(path) as file:
        return is_matrix(file)


def _in_subfolder(
    folder: Path, folders: _Files, truth: str | None, depth: int, seen: frozenset[str]
) -> CohortFiles | None:
    """Find the bags in the only subfolder that contains features. Circular links are followed once."""
    here = os.path.realpath(folder)
    if depth == _DEEPEST or here in seen:
        return None
    below = {}
    for name, child in folders.items():
        if os.path.realpath(child) not in seen | {here}:
            cohort = _in_folder(child, truth, depth + 1, seen | {here})
            if cohort is not None:
                below[name] = cohort
    return _only(folder, below, "the only folder with features")


def _in_file(path: Path, truth: str | None) -> CohortFiles | None:
    beside = path.parent / "instances.csv"
    if (path.name == "features.npy" and beside.exists()) or _is_matrix_file(path):
        return find_in_matrix(path, truth)
    if kind_of(path) is None:
        return None
    cohort = _in_folder(path.parent, None) if path.parent.name in ("h5_files", "pt_files") else None
    if cohort is not None:
        return replace(cohort, sources=tuple(source for source in cohort.sources if source.path == path), notes=())
    return _in_files({path.name: path})


def _in_files(files: _Files, layout: str | None = None) -> CohortFiles | None:
    """Find bags in one file per slide. `layout` is that of the h5 files if it is known; it determines the unit of coordinates."""
    features = {name: path for name, path in files.items() if kind_of(path)}
    if not features:
        return None
    others = sorted(set(files) - set(features))
    notes = [f"{plural(len(others), 'other file')} left out: {examples(others, 6)}"] if others else []
    recognised, layout_notes = _recognise(features.values())
    if recognised == "acmil":
        groups = [(path, *group) for path in features.values() if kind_of(path) == "h5" for group in groups_of(path)]
        sources = tuple(Source(id, path, "acmil", (), id, label) for path, id, label in groups)
        return CohortFiles(sources, "acmil", tuple(notes))
    sources = tuple(_source(path, layout or recognised) for path in features.values())
    if layout is not None:
        return CohortFiles(sources, layout, tuple(notes))
    kinds = Counter(kind_of(path) for path in features.values())
    name = "+".join(sorted(recognised if kind == "h5" else str(kind) for kind in kinds))
    return CohortFiles(sources, name, (*notes, *layout_notes))


def _source(path: Path, h5_layout: str) -> Source:
    kind = str(kind_of(path))
    return Source(path.name[: -len(path.suffix)], path, h5_layout if kind == "h5" else kind)


def _recognise(paths: Iterable[Path]) -> tuple[str, tuple[str, ...]]:
    """Recognise the layout of these files by the first that can be opened, with notes. Damaged files are reported
    when they are read.
    """
    for path in islice(paths, 3):
        try:
            with open_arrays(path) as file:
                return _layout_of(file)
        except CarmilError:
            continue
    return "h5", ()


def _layout_of(file: ArrayFile) -> tuple[str, tuple[str, ...]]:
    coordinates = file.find(COORDINATE_NAMES)
    if written_by_stamp(file):
        old = "old STAMP files without a unit: coordinates become micrometres as in STAMP itself, times 256/224"
        return "stamp", () if file.attribute("unit") is not None else (old,)
    if kind_of(file.path) == "h5":
        if not set(file.names) & {*FEATURE_NAMES, *COORDINATE_NAMES} and groups_of(file.path):
            return "acmil", ()
        if coordinates is not None and coordinates.attribute("patch_size_level0") is not None:
            return "trident", ()
    if coordinates is None:
        return "h5", ()
    unit = file.attribute("unit") or file.attribute("coordinate_unit") or coordinates.attribute("unit")
    return "h5", (_NO_UNIT,) if unit is None else ()


def _by_clam(folder: Path, folders: _Files) -> CohortFiles | None:
    if folder.name in ("h5_files", "pt_files"):
        folders = {folder.name: folder}
    kinds = {name: _in_files(_list(folders[name])[0], "clam") for name in ("h5_files", "pt_files") if name in folders}
    cohorts = {name: cohort for name, cohort in kinds.items() if cohort is not None}
    if not cohorts:
        return None
    chosen, cohort = next(iter(cohorts.items()))
    ids, notes = {source.id for source in cohort.sources}, list(cohort.notes)
    added = tuple(source for source in cohorts.get("pt_files", cohort).sources if source.id not in ids)
    if len(cohorts) == 2:
        notes.append("read h5_files, not pt_files: they have coordinates")
    if added:
        names = examples(sorted(source.id for source in added), 6)
        notes.append(f"read {plural(len(added), 'slide')} from pt_files, not in h5_files: {names}")
    home = folders[chosen].parent
    places = [place for place in (home / "patches", home.parent / "patches") if place.is_dir()]
    sources = []
    for source in (*cohort.sources, *added):
        patches = (place / f"{source.id}.h5" for place in places)
        companions = tuple(("patches", path) for path in patches if path.is_file())[:1]
        sources.append(replace(source, layout="clam", companions=companions))
    if without := [source.id for source in sources if not source.companions]:
        notes.append(f"the size of a tile is unknown for {plural(len(without), 'slide')}: no file of patches was found")
    return CohortFiles(tuple(sources), "clam", tuple(notes))


def _by_trident(folder: Path, folders: _Files) -> CohortFiles | None:
    if folder.name.startswith("features_"):
        return _in_files(_list(folder)[0], "trident")
    jobs = [folders, *(_list(path)[1] for name, path in folders.items() if "px_overlap" in name)]
    paths = [path for job in jobs for path in job.values()]
    held = {path: _in_files(_list(path)[0], "trident") for path in paths if path.name.startswith("features_")}
    cohorts = {str(path.relative_to(folder)): cohort for path, cohort in held.items() if cohort is not None}
    if not cohorts and (whole := [path for path in paths if path.name.startswith("slide_features_")]):
        raise _slide_level(whole[0])
    return _only(folder, cohorts)


def _by_torchmil(folder: Path, folders: _Files) -> CohortFiles | None:
    features = None
    if folder.name.startswith("features_") and folder.parent.name == "features":
        features, folder = folder, folder.parent.parent
    elif folder.name == "features" and "features" not in folders:
        folder = folder.parent
    folders = _list(folder)[1]
    beside = [name for name in ("labels", "inst_labels", "patch_labels", "coords") if name in folders]
    if "features" not in folders or not beside:
        return None
    cohort = _in_files(_list(features or _torchmil_features(folders["features"]))[0], "torchmil")
    if cohort is None:
        return None
    by_id: dict[str, dict[str, Path]] = {
        name: {path.stem: path for path in _list(folders[name])[0].values() if kind_of(path)} for name in beside
    }
    notes = [f"torchmil's files name no unit: {_LEVEL0}"] if "coords" in by_id else []
    sources = tuple(_torchmil_source(source, by_id) for source in cohort.sources)
    return CohortFiles(sources, "torchmil", (*cohort.notes, *notes))


def _torchmil_features(folder: Path) -> Path:
    files, folders = _list(folder)
    if any(kind_of(path) for path in files.values()) or not folders:
        return folder
    if len(folders) > 1:
        raise _several(folder, folders)
    return next(iter(folders.values()))


def _torchmil_source(source: Source, by_id: dict[str, dict[str, Path]]) -> Source:
    """Add the files of coordinates and instance labels, and the label; without a label file, whether any instance is positive."""
    paths = {name: files[source.id] for name, files in by_id.items() if source.id in files}
    companions = [("coords", paths["coords"])] if "coords" in paths else []
    truth, label = paths.get("inst_labels") or paths.get("patch_labels"), None
    if truth is not None:
        companions.append(("instance_labels", truth))
    if "labels" in paths:
        with open_arrays(paths["labels"]) as file:
            array = file.one_of(("labels", "label", "arr_0", ""))
            label = str(read_instance_labels(array if array.shape else replace(array, shape=(1,)), 1)[0])
    elif truth is not None:
        with open_arrays(truth) as file:
            array = file.one_of((*INSTANCE_LABEL_NAMES, "labels", "arr_0", ""))
            label = str(int((read_instance_labels(array, max(array.shape, default=0)) > 0).any()))
    return replace(source, layout="torchmil", companions=tuple(companions), label=label)


def _by_slideflow(files: _Files) -> CohortFiles | None:
    config = {"bags_config.json": "config"}
    index = _slideflow_indices(files)
    cohort = _in_files({name: path for name, path in files.items() if name not in (*index, *config)}, "slideflow")
    bags = () if cohort is None else tuple(source for source in cohort.sources if kind_of(source.path) == "pt")
    if cohort is None or not bags:
        return None
    sources = []
    for source in bags:
        places = [name for name in index if name.rsplit(".", 2)[0] == source.path.stem]
        companions = [("coords", files[name]) for name in sorted(places, reverse=True)[:1]]  # npz before npy
        companions += [(role, files[name]) for name, role in config.items() if name in files]
        sources.append(replace(source, layout="slideflow", companions=tuple(companions)))
    note = "slideflow records the centre of a tile in level-0 pixels, and not the size of the tile"
    return CohortFiles(tuple(sources), "slideflow", (*cohort.notes, note))


def _slideflow_indices(files: _Files) -> list[str]:
    return [name for name in files if name.endswith((".index.npz", ".index.npy"))]


def _list(folder: Path) -> tuple[_Files, _Files]:
    """List the files and folders by name, sorted, without names that begin with a dot."""
    with one_line_errors(folder):
        names = sorted(name for name in os.listdir(folder) if not name.startswith(".") and name != NAMES_TABLE)
    folders = {name: folder / name for name in names if (folder / name).is_dir()}
    return {name: folder / name for name in names if name not in folders}, folders


def _only(folder: Path, cohorts: dict[str, CohortFiles], reason: str = "") -> CohortFiles | None:
    """Return the only cohort among these folders, with a note that names its folder."""
    if len(cohorts) > 1:
        raise _several(folder, cohorts)
    for name, cohort in cohorts.items():
        return replace(cohort, notes=(f"read {name}" + (f": {reason} in {folder}" if reason else ""), *cohort.notes))
    return None


def _several(folder: Path, names: Iterable[str]) -> CarmilError:
    return CarmilError(
        f"{folder} holds features in several folders ({examples(sorted(names), 6)}): give the path of one of them"
    )


def _slide_level(folder: Path) -> CarmilError:
    return CarmilError(
        f"{folder} holds one vector per slide instead of one per tile: give a features_ENCODER folder with "
        "tile features"
    )
