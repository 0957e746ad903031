"""Write bags in the layouts of other tools.

Data that a layout cannot represent are left out; data that the tool would misread are refused.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from carmil.bags.sources import Bag
from carmil.bags.store import Store
from carmil.errors import CarmilError
from carmil.files import atomic_file, safe_name, write_text
from carmil.hdf5 import attribute_text, new_hdf5
from carmil.recorded_names import names_for, write_names
from carmil.untrusted import parse_as, read_json

_EXPORTED = "carmil_export.json"  # the files of each export, with the fingerprint of its store


def write_bag(bag: Bag, folder: Path, layout: str, *, names: Mapping[str, str] | None = None) -> Path:
    """Write one bag below `folder` in the layout of a tool, and return the file with its features.

    names: the file names from `write_names` for this folder, if several bags are written.
    """
    if layout not in _WRITERS:
        raise CarmilError(f"no layout {layout!r} to write {bag.id!r} in: expected one of {', '.join(_WRITERS)}")
    if bag.instance_labels is not None and bag.instance_labels.ndim > 1:
        bag = replace(bag, instance_labels=None)  # no layout can represent signed truth per class
    name = (write_names(folder, [bag.id]) if names is None else names)[bag.id]
    return _WRITERS[layout](bag, folder, name)


def files_of(layout: str, folder: Path, name: str, encoder: str | None) -> tuple[Path, ...]:
    """Return all files that `write_bag` may write for a bag in the layout of CLAM or TRIDENT. `name` is their stem."""
    return _clam_files(folder, name) if layout == "clam" else (_trident_file(folder, name, encoder),)


def _clam_files(folder: Path, name: str) -> tuple[Path, Path, Path]:
    return (
        folder / "pt_files" / f"{name}.pt",
        folder / "h5_files" / f"{name}.h5",
        folder / "patches" / f"{name}.h5",
    )


def _trident_file(folder: Path, name: str, encoder: str | None) -> Path:
    return folder / f"features_{safe_name(encoder or 'unknown')}" / f"{name}.h5"


def _write_clam(bag: Bag, folder: Path, name: str) -> Path:
    """Write h5_files and pt_files, and patches if the tile size is known; without coordinates, pt_files only."""
    places = _level0(bag, "CLAM")
    tensor, path, patches = _clam_files(folder, name)
    _save_tensor(tensor, bag.features)
    if places is None:
        return tensor
    with new_hdf5(path) as file:
        for key, values in (("features", bag.features), ("coords", places.astype(np.int32))):
            width = values.shape[1]
            file.create_dataset(key, data=values, chunks=(32, width), maxshape=(None, width))
    if bag.tile_size is not None:
        # CLAM has whole pixels; the downsample contains the fraction.
        size = max(1, round(bag.tile_size))
        with new_hdf5(patches) as file:
            coords = file.create_dataset("coords", data=places, chunks=(32, 2), maxshape=(None, 2))
            downsample = np.array([bag.tile_size / size] * 2)
            coords.attrs.update(
                patch_size=size,
                patch_level=0,
                downsample=downsample,
                name=attribute_text(bag.id),
                save_path=str(folder),
            )
            coords.attrs.update(_known(**asdict(bag.geometry)))
    return path


def _write_trident(bag: Bag, folder: Path, name: str) -> Path:
    """Write features_ENCODER, one row per chunk as TRIDENT does."""
    places = _level0(bag, "TRIDENT")
    path = _trident_file(folder, name, bag.encoder)
    with new_hdf5(path) as file:
        width = bag.features.shape[1]
        features = file.create_dataset("features", data=bag.features, chunks=(1, width), maxshape=(None, width))
        features.attrs.update(
            name=attribute_text(bag.id),
            savetodir=str(path.parent),
            encoder=attribute_text(str(bag.encoder)),
            **_known(pooling=bag.pooling, tiling=bag.tiling),
        )
        if places is not None:
            coords = file.create_dataset("coords", data=places, chunks=(1, 2), maxshape=(None, 2))
            coords.attrs.update(
                name=attribute_text(bag.id), savetodir=str(path.parent), patch_size_level0=_number(bag.tile_size)
            )
            coords.attrs.update(_known(**asdict(bag.geometry), patch_size=bag.geometry.tile_pixels))
            if bag.geometry.tile_mpp is not None:
                coords.attrs["target_magnification"] = _number(10 / bag.geometry.tile_mpp)
    return path


def _write_stamp(bag: Bag, folder: Path, name: str) -> Path:
    if bag.coordinates is None or bag.coordinate_unit != "um":
        raise CarmilError(
            f"bag {bag.id!r} has coordinates in {bag.coordinate_unit}: STAMP's files need micrometres; multiply by the "
            "slide's micrometres per pixel first"
        )
    path = folder / f"{name}.h5"
    with new_hdf5(path) as file:
        file["feats"] = bag.features
        file["coords"] = bag.coordinates.astype(np.float32)
        file.attrs.update(
            extractor=attribute_text(bag.encoder or "unknown"),
            unit="um",
            feat_type="tile",
            **_known(pooling=bag.pooling, tiling=bag.tiling),
        )
        tile = {"tile_size_px": bag.geometry.tile_pixels, "tile_size_um": bag.tile_size}
        file.attrs.update(_known(**asdict(bag.geometry), **tile))
    return path


def _write_torchmil(bag: Bag, folder: Path, name: str) -> Path:
    """Write one folder each for features, coords and inst_labels; labels belong to the cohort, not to a bag."""
    places = _level0(bag, "torchmil")
    for kind, values in (("coords", places), ("inst_labels", bag.instance_labels)):
        if values is not None:
            _save_npy(folder / kind / f"{name}.npy", values)
    return _save_npy(folder / "features" / f"{name}.npy", bag.features)


def _write_slideflow(bag: Bag, folder: Path, name: str) -> Path:
    places = _level0(bag, "slideflow")
    if places is not None:
        with atomic_file(folder / f"{name}.index.npz") as aside, aside.open("wb") as stream:
            np.savez(stream, places)
    extractor = None if bag.encoder is None else {"class": bag.encoder, "kwargs": {}}
    pixels, mpp = bag.geometry.tile_pixels, bag.geometry.tile_mpp
    config: dict[str, Any] = {"extractor": extractor} | ({} if pixels is None else {"tile_px": pixels})
    config |= {} if pixels is None or mpp is None else {"tile_um": pixels * mpp}
    write_text(folder / "bags_config.json", json.dumps(config, indent=1))
    return _save_tensor(folder / f"{name}.pt", bag.features)


def _write_npy(bag: Bag, folder: Path, name: str) -> Path:
    return _save_npy(folder / f"{name}.npy", bag.features)


def _write_npz(bag: Bag, folder: Path, name: str) -> Path:
    path = folder / f"{name}.npz"
    with atomic_file(path) as aside, aside.open("wb") as stream:
        held: dict[str, Any] = {**_arrays(bag), **_words(bag)}
        np.savez(stream, **held)
    return path


def _write_pt(bag: Bag, folder: Path, name: str) -> Path:
    """Write a bare tensor if the bag has features only, otherwise a dict of tensors, text and numbers."""
    import torch

    path, arrays, words = folder / f"{name}.pt", _arrays(bag), _words(bag)
    if len(arrays) == 1 and not words:
        return _save_tensor(path, bag.features)
    with atomic_file(path) as aside:
        torch.save({name: torch.from_numpy(values) for name, values in arrays.items()} | words, aside)
    return path


def _write_safetensors(bag: Bag, folder: Path, name: str) -> Path:
    import torch

    from carmil.weights import write_tensors

    path = folder / f"{name}.safetensors"
    tensors = {name: torch.from_numpy(values) for name, values in _arrays(bag).items()}
    write_tensors(path, tensors, {name: str(value) for name, value in _words(bag).items()})
    return path


_WRITERS: dict[str, Callable[[Bag, Path, str], Path]] = {
    "clam": _write_clam,
    "trident": _write_trident,
    "stamp": _write_stamp,
    "torchmil": _write_torchmil,
    "slideflow": _write_slideflow,
    "npy": _write_npy,
    "npz": _write_npz,
    "pt": _write_pt,
    "safetensors": _write_safetensors,
}


def _arrays(bag: Bag) -> dict[str, np.ndarray]:
    arrays = {"features": bag.features, "coords": bag.coordinates, "instance_labels": bag.instance_labels}
    return {name: np.ascontiguousarray(values) for name, values in arrays.items() if values is not None}


def _words(bag: Bag) -> dict[str, Any]:
    """Return all known attributes of the bag."""
    words = {"coordinate_unit": bag.coordinate_unit, "tile_size": bag.tile_size, "encoder": bag.encoder}
    words |= {"pooling": bag.pooling, "tiling": bag.tiling}
    return _known(**words, **asdict(bag.geometry), **asdict(bag.slide_file))


def _known(**attributes: Any) -> dict[str, Any]:
    """Return the attributes that have a value."""
    return {name: value for name, value in attributes.items() if value is not None}


def _level0(bag: Bag, tool: str) -> np.ndarray | None:
    """Return coordinates in whole level-0 pixels, the only unit of the tool."""
    if bag.coordinates is None:
        return None
    if bag.coordinate_unit != "level0_px":
        raise CarmilError(
            f"bag {bag.id!r} has coordinates in {bag.coordinate_unit}: {tool}'s files need level-0 pixels; divide by the "
            "slide's micrometres per pixel first"
        )
    return np.rint(bag.coordinates).astype(np.int64)


def _number(size: float | None) -> int | float | str:
    """Return the number as TRIDENT writes it: None as text, whole pixels as an int."""
    if size is None:
        return "None"
    return int(size) if float(size).is_integer() else float(size)


def _save_npy(path: Path, values: np.ndarray) -> Path:
    with atomic_file(path) as aside, aside.open("wb") as stream:
        np.save(stream, values)
    return path


def _save_tensor(path: Path, values: np.ndarray) -> Path:
    import torch

    with atomic_file(path) as aside:
        torch.save(torch.from_numpy(np.ascontiguousarray(values)), aside)
    return path


def begin_export(store: Store, folder: Path, layout: str) -> dict[str, str]:
    """List the files of an export and return the names that `write_bag` gives them, by the id of the bag.

    Refuses the export, before anything is written, if it would replace files that no export of this store wrote. They
    are listed before they are written, so that an interrupted export can be run again. layout: clam or trident.
    """
    table, again, known = folder / _EXPORTED, "choose another --out", dict[str, str]()
    if table.exists():
        known = parse_as(read_json(table, again), dict[str, str], str(table), again)
    names = names_for(folder, store.ids)
    files = [file for entry in store.entries for file in files_of(layout, folder, names[entry.id], entry.encoder)]
    own = {file.relative_to(folder).as_posix(): store.fingerprint for file in files}
    others = [name for name in own if known.get(name) != store.fingerprint and (folder / name).exists()]
    if others:
        more = f" (and {len(others) - 1:,} more)" if len(others) > 1 else ""
        raise CarmilError(
            f"{folder / others[0]}{more} exists, and no export of {store.path} wrote it: it would be replaced; {again}"
        )
    write_text(table, json.dumps(known | own, indent=1))
    return write_names(folder, store.ids)
