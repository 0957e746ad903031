"""Encode slides into a store of features; slides that are in the store are encoded again only if their file changed.

STORE                      the features of all slides, including those of earlier calls
STORE.encoding/ENCODER     one complete file per slide while the store is built; run the same command again to resume. Tiles of
                           another geometry have their own folder.
STORE.encoding/ENCODER.parts  the first features of a slide that is being encoded, written every minute
"""

import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from carmil.bags.building import build_store, lock_file
from carmil.bags.geometry import UNKNOWN, TileGeometry, check_geometry
from carmil.bags.readers import read_bag
from carmil.bags.sources import Bag, SlideFile, Source, slide_file_at
from carmil.bags.store import Store, checksum, is_store, open_store
from carmil.bags.writers import write_bag
from carmil.errors import CarmilError
from carmil.files import atomic_folder, safe_name
from carmil.locks import folder_lock
from carmil.progress import encoding_progress
from carmil.recorded_names import write_names
from carmil.slides.device_encoder import DeviceEncoder
from carmil.slides.dicom_series import slide_name
from carmil.slides.encoders import Encoder
from carmil.slides.encoding import Times, encode
from carmil.slides.opening import open_slide
from carmil.slides.slide import Tiles, check_same_size
from carmil.slides.tiling import read_tiles, tiles_file

PART_SECONDS = 60.0  # an interrupted call loses at most about this much


@dataclass
class EncodedSlides:
    """The result of `encode_slides`. kept: slides already in the store; broken: the error of each failed slide, by its
    file; store: None if it is empty.
    """

    kept: list[str] = field(default_factory=list)
    broken: dict[Path, str] = field(default_factory=dict)
    times: Times = field(default_factory=Times)
    store: Store | None = None


def encode_slides(
    tiles: Mapping[Path, Tiles],
    out: Path,
    encoder: Encoder,
    *,
    device: str,
    files: tuple[str, Path] | None = None,
    say: Callable[[str], None],
    before_change: Callable[[Collection[str]], None] = lambda kept: None,
) -> EncodedSlides:
    """Encode the tiles of every slide (by its file) into the store `out`.

    files: a layout and a folder, to write files for another tool as well. All tiles have one geometry, that of the
    store if it exists. before_change: called before a new store takes the place of the old one, with the slides whose
    features stay the same, so that what was computed from the others can be removed first.
    """
    with folder_lock(lock_file(out), out):
        return _encode_slides(tiles, out, encoder, device, files, say, before_change)


def _encode_slides(
    tiles: Mapping[Path, Tiles],
    out: Path,
    encoder: Encoder,
    device: str,
    files: tuple[str, Path] | None,
    say: Callable[[str], None],
    before_change: Callable[[Collection[str]], None],
) -> EncodedSlides:
    geometry = _one_geometry(tiles.values())
    store = _existing_store(out, encoder, geometry, say)
    work = out.with_name(f"{out.name}.encoding") / _work_name(encoder, geometry)
    if remark := encoder.magnification_remark(geometry):
        say(remark)
    ids = [*(cut.slide for cut in tiles.values()), *(store.ids if store is not None else ())]
    names = write_names(work, ids)
    names_of_files = {} if files is None else write_names(files[1], ids)
    placed, found = DeviceEncoder(encoder, device), EncodedSlides()
    with encoding_progress(len(tiles), sum(map(len, tiles.values()))) as (on_slide, on_tiles):
        for number, (path, cut) in enumerate(tiles.items(), 1):
            on_slide(cut.slide, number)
            bag = _stored_bag(cut, encoder, store, work / f"{names[cut.slide]}.safetensors")
            if bag is not None and bag.slide_file.differs_from(slide_file_at(path)):
                say(f"{path} has changed since it was encoded (another size or modification time): encoding it again")
                bag = None
            if bag is not None:
                found.kept.append(cut.slide)
                on_tiles(len(cut))
            else:
                try:
                    part = work.with_name(f"{work.name}.parts"), names[cut.slide]
                    bag = _encode_slide(path, cut, placed, part, found, on_tiles)
                except CarmilError as error:
                    found.broken[path] = str(error)
                    continue
                write_bag(bag, work, "safetensors", names=names)
            if files is not None:
                write_bag(bag, files[1], files[0], names=names_of_files)
    found.store = _pack(store, work, names, out, say, before_change)
    if found.store is not None and len(found.store.tilings) > 1:
        say(f"the tiles of {out} were chosen in several ways: {'; '.join(found.store.tilings)}")
    return found


def tiles_of(slides: Sequence[Path], folder: Path) -> tuple[dict[Path, Tiles], dict[Path, str]]:
    """Return the tiles of each slide that `carmil slides tile` (or TRIDENT) wrote in `folder`, and the errors of the others."""
    tiles_by_slide: dict[Path, Tiles] = {}
    broken: dict[Path, str] = {}
    for path in slides:
        name = slide_name(path)
        file = tiles_file(folder, name)
        try:
            if not file.is_file():
                raise CarmilError(f"{path} has no tiles in {folder}: `carmil slides tile` cuts them")
            tiles_by_slide[path] = replace(read_tiles(file), slide=name)
        except CarmilError as error:
            broken[path] = str(error)
    return tiles_by_slide, broken


def _one_geometry(tiles: Iterable[Tiles]) -> TileGeometry:
    """Return the common geometry of the tiles of all slides; refuse tiles that differ."""
    first: Tiles | None = None
    for cut in tiles:
        first = first or cut
        if cut.geometry.differs_from(first.geometry):
            raise CarmilError(
                f"{cut.slide} has tiles of {cut.geometry}, {first.slide} has {first.geometry}: expected the "
                "same tile geometry for all slides; cut them again, for instance with "
                f"`{first.geometry.command}`"
            )
    return UNKNOWN if first is None else first.geometry


def _work_name(encoder: Encoder, geometry: TileGeometry) -> str:
    """Return a folder name that keeps features of another encoder, pooling or geometry out of the same store."""
    description = repr((encoder.pooling, geometry.tile_pixels, geometry.tile_mpp))
    return f"{safe_name(encoder.name)}-{checksum(description.encode())[:8]}"


def _existing_store(out: Path, encoder: Encoder, geometry: TileGeometry, say: Callable[[str], None]) -> Store | None:
    """Return the store to add to, or None; refuse one that does not fit."""
    if not is_store(out):
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise CarmilError(f"{out} exists and is not a store: choose another --out")
        return None
    store = open_store(out)
    if store.encoder != encoder.name:
        raise CarmilError(
            f"{out} was encoded by {store.encoder or 'an unknown encoder'}, this is {encoder.name}: choose another --out"
        )
    if store.width != encoder.width or store.pooling not in (None, encoder.pooling):
        raise CarmilError(
            f"{out} has {store.width} features per tile, pooled by {store.pooling or 'an unknown rule'}; {encoder.name} gives "
            f"{encoder.width}, pooled by {encoder.pooling}: choose another --out"
        )
    if geometry != UNKNOWN:
        todo = f"choose another --out, or cut the tiles with `{store.geometry.command}`"
        check_geometry(geometry, store.geometry, what="this call", whose=f"the store {out}", todo=todo, log=say)
    return store


def _stored_bag(tiles: Tiles, encoder: Encoder, store: Store | None, file: Path) -> Bag | None:
    """Return the features of exactly these tiles from the file or the store, or None."""
    bag = None
    if file.is_file():
        try:
            bag = read_bag(Source(tiles.slide, file, "safetensors"))
        except CarmilError:
            return None
    elif store is not None and tiles.slide in store.ids:
        bag = store.bag(store.ids.index(tiles.slide))
    return bag if bag is not None and _has_tiles(bag, tiles, encoder) else None


def _has_tiles(bag: Bag, tiles: Tiles, encoder: Encoder) -> bool:
    """Return whether a bag has the features of exactly these tiles."""
    return (
        bag.encoder == encoder.name
        and bag.pooling in (None, encoder.pooling)
        and bag.tile_size == tiles.size
        and not bag.geometry.differs_from(tiles.geometry)
        and bag.coordinates is not None
        and np.array_equal(bag.coordinates, tiles.corners.astype(np.float32))
    )


def _encode_slide(
    path: Path,
    tiles: Tiles,
    encoder: DeviceEncoder,
    part: tuple[Path, str],
    found: EncodedSlides,
    on_tiles: Callable[[int], None],
) -> Bag:
    """Encode a slide. part: the folder and name of a file for its first features, from which the next call resumes."""
    if not len(tiles):
        raise CarmilError(f"{path} has no tiles: expected at least one to encode")
    slide_file = slide_file_at(path, width=tiles.width, height=tiles.height)
    corners, saved = tiles.corners.astype(np.float32), time.monotonic()
    folder, name = part

    def bag_of(features: NDArray[np.float16]) -> Bag:
        return Bag(
            id=tiles.slide,
            features=features,
            coordinates=corners[: len(features)],
            coordinate_unit="level0_px",
            tile_size=tiles.size,
            encoder=encoder.encoder.name,
            pooling=encoder.encoder.pooling,
            geometry=tiles.geometry,
            slide_file=slide_file,
            tiling=tiles.tiling,
        )

    def save(features: NDArray[np.float16]) -> None:
        nonlocal saved
        if time.monotonic() - saved >= PART_SECONDS:
            write_bag(bag_of(features), folder, "safetensors", names={tiles.slide: name})
            saved = time.monotonic()

    file = folder / f"{name}.safetensors"
    known = _first_features(file, tiles, encoder.encoder, slide_file)
    if known is not None:
        on_tiles(len(known))
    with open_slide(path, mpp=tiles.slide_mpp) as slide:
        check_same_size(slide, tiles.width, tiles.height)
        encoded = encode(slide, tiles, encoder, known=known, on_tiles=on_tiles, on_features=save)
    file.unlink(missing_ok=True)
    found.times += encoded.times
    return bag_of(encoded.features)


def _first_features(file: Path, tiles: Tiles, encoder: Encoder, slide_file: SlideFile) -> NDArray[np.float16] | None:
    """Return the matching features that an interrupted call wrote of the slide's first tiles; None without any."""
    try:
        bag = read_bag(Source(tiles.slide, file, "safetensors")) if file.is_file() else None
    except CarmilError:
        return None
    if bag is None or bag.slide_file.differs_from(slide_file):
        return None
    first = replace(tiles, corners=tiles.corners[: len(bag.features)])
    same = _has_tiles(bag, first, encoder) and bag.features.shape == (len(first), encoder.width)
    return bag.features.astype(np.float16) if same else None


def _pack(
    store: Store | None,
    work: Path,
    names: Mapping[str, str],
    out: Path,
    say: Callable[[str], None],
    before_change: Callable[[Collection[str]], None],
) -> Store | None:
    """Return the store with the new slides added. The old store stays until the new one is complete."""
    new = {file.stem for file in work.glob("*.safetensors")} if work.is_dir() else set()
    if not new:
        return store
    for i, entry in enumerate(store.entries if store is not None else ()):
        if names[entry.id] not in new:
            assert store is not None
            write_bag(store.bag(i), work, "safetensors", names=names)
    with atomic_folder(out) as aside:
        built = build_store(work, aside, log=say)
        before_change({entry.id for entry in built.entries if store is not None and entry in store.entries})
    shutil.rmtree(work)
    with suppress(OSError):
        work.with_name(f"{work.name}.parts").rmdir()  # unless it has the part of a slide that failed
    if not any(work.parent.iterdir()):
        work.parent.rmdir()
    return open_store(out)
