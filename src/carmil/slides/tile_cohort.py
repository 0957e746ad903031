"""Cut the slides of a cohort into tiles; slides that cannot be cut are reported and skipped, and finished slides are kept."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from carmil.bags.geometry import TileGeometry
from carmil.bags.sources import SlideFile, slide_file_at
from carmil.csv_files import csv_text
from carmil.errors import CarmilError
from carmil.files import safe_name, write_text
from carmil.slides.contact_sheets import write_contact_sheets, write_sheet
from carmil.slides.dicom_series import slide_name
from carmil.slides.opening import open_slide
from carmil.slides.overview import read_overview
from carmil.slides.quality import RULES, apply_rules, check_rules
from carmil.slides.slide import GivenMpp, Tiles
from carmil.slides.tiling import (
    check_tiles,
    cut,
    geometries_in,
    read_more,
    read_tiles,
    tiles_file,
    tiling_text,
    write_tiles,
)
from carmil.slides.tissue import find_tissue, preset


@dataclass(frozen=True)
class TileSettings:
    """Settings for cutting slides. keep: names of quality rules that are switched off."""

    pixels: int = 256
    mpp: float = 0.5
    overlap: float = 0.0
    rule: str = "centre"
    preset: str = "default"
    keep: tuple[str, ...] = ()

    @property
    def geometry(self) -> TileGeometry:
        return TileGeometry(self.pixels, self.mpp)

    @property
    def tiling(self) -> str:
        return tiling_text(preset=self.preset, rule=self.rule, overlap=self.overlap, keep=self.keep)

    def with_tiling(self, tiling: str) -> "TileSettings":
        """Return these settings with tiles chosen as described by a text from `tiling_text`."""
        words = tiling.split()
        try:
            named = dict(zip(words[::2], words[1::2], strict=True))
            keep = tuple(name for name in named.pop("--keep", "").split(",") if name)
            preset, rule, overlap = (named.pop(f"--{name}") for name in ("preset", "rule", "overlap"))
            settings = replace(self, preset=preset, rule=rule, overlap=float(overlap), keep=keep)
        except (KeyError, ValueError):
            raise CarmilError(
                f"{tiling!r}: expected options of `carmil slides tile`, such as {self.tiling!r}"
            ) from None
        settings.check()
        return settings

    def check(self) -> None:
        check_tiles(self.pixels, self.mpp, self.overlap, self.rule)
        preset(self.preset)
        check_rules(self.keep)


@dataclass(frozen=True)
class Outcome:
    """The result for a slide: its tiles, or a description of the `problem`. resumed: an earlier run had cut it."""

    path: Path
    tiles: Tiles | None = None
    problem: str = ""
    resumed: bool = False
    mm2: float = 0.0
    mpp_from: str = ""
    left_out: tuple[tuple[str, int], ...] = ()

    @property
    def name(self) -> str:
        return slide_name(self.path)


def tile_slides(
    paths: Sequence[Path],
    out: Path,
    settings: TileSettings | None = None,
    *,
    mpp: float | None = None,
    mpps: Mapping[Path, float] | None = None,
    on_slide: Callable[[int, int], None] = lambda done, total: None,
) -> list[Outcome]:
    """Write the tiles and the sheet of each slide below `out`, then contact_sheet.png and tiles.csv of all slides.

    mpp: micrometres per pixel of slides whose file has none. mpps: by slide, in place of the file's value.

    A folder that holds tiles of another geometry is refused before anything is written. Tiles and sheet of an earlier call, with
    other settings or from another file, are removed if the slide is skipped now.
    """
    settings = settings or TileSettings()
    settings.check()
    _check_folder(out, settings)
    outcomes = []
    with ThreadPoolExecutor(1) as sheets:  # a sheet is drawn while the next slide is read
        drawn: Future[None] | None = None
        for i, path in enumerate(paths):
            on_slide(i, len(paths))
            try:
                outcome, draw = tile_slide(path, out, settings, mpp=GivenMpp((mpps or {}).get(path), mpp))
            except CarmilError as error:
                removed = "; its tiles of an earlier call were removed" if _remove_tiles(path, out) else ""
                outcome, draw = Outcome(path, problem=f"{error}{removed}"), None
            outcomes.append(outcome)
            if drawn is not None:
                drawn.result()
            drawn = None if draw is None else sheets.submit(draw)
        if drawn is not None:
            drawn.result()
    on_slide(len(paths), len(paths))
    write_contact_sheets(out / "contact_sheet.png", [_cell(out, outcome) for outcome in outcomes])
    _write_table(out / "tiles.csv", outcomes)
    return outcomes


def tile_slide(
    path: Path, out: Path, settings: TileSettings, *, mpp: GivenMpp
) -> tuple[Outcome, Callable[[], None] | None]:
    """Write the tiles of one slide; return the outcome and the function that draws its sheet, None if an earlier run drew it."""
    words = _facts(path, settings, mpp)
    if (done := _earlier_outcome(path, out, words)) is not None:
        return done, None
    with open_slide(path, mpp=mpp.slide, missing_mpp=mpp.missing) as slide:
        overview = read_overview(slide, detail="blurred" not in settings.keep)
        tissue = find_tissue(slide, overview, preset(settings.preset))
        found = cut(
            slide, tissue, pixels=settings.pixels, mpp=settings.mpp, overlap=settings.overlap, rule=settings.rule
        )
        tiles, left_out = apply_rules(replace(found, tiling=settings.tiling), overview, tissue, keep=settings.keep)
    gone = {name: len(some) for name, some in left_out.items()}
    if not len(tiles):
        side = f"{settings.pixels * settings.mpp:g} um"
        reasons = ", ".join(f"{count} {name}" for name, count in gone.items() if count)
        why = f"left out: {reasons}" if reasons else f"no square of {side} fits"
        raise CarmilError(f"{path}: {tissue.mm2:.3f} mm2 of tissue, but no tile ({why})")
    more = {**words, "left_out": gone, "tissue_mm2": tissue.mm2, "mpp_from": slide.mpp_from}
    sheet = _sheet_path(out, path)
    sheet.unlink(missing_ok=True)  # of other settings; a slide without a sheet counts as not cut
    write_tiles(tiles, out, overlap=settings.overlap, more=more)
    outcome = Outcome(path, tiles, mm2=tissue.mm2, mpp_from=slide.mpp_from, left_out=tuple(gone.items()))
    return outcome, lambda: write_sheet(sheet, slide, overview, tissue, tiles, left_out)


def is_cut(path: Path, out: Path, settings: TileSettings, *, mpp: GivenMpp) -> bool:
    """Return whether an earlier call cut this file with these settings."""
    return _earlier_outcome(path, out, _facts(path, settings, mpp)) is not None


def _facts(path: Path, settings: TileSettings, mpp: GivenMpp) -> dict[str, Any]:
    """Return the settings and the properties of the file that the tiles of a slide depend on."""
    file = slide_file_at(path)
    # An earlier version used the mpp of all slides in place of a file's value: its tiles are cut again.
    given = {"given_mpp": mpp.slide} if mpp.missing is None else {"given_mpp": mpp.slide, "missing_mpp": mpp.missing}
    facts = {"settings": {**asdict(settings), "keep": sorted(settings.keep), **given}}
    return {**facts, "bytes": file.slide_bytes, "mtime": file.slide_mtime}


def _check_folder(out: Path, settings: TileSettings) -> None:
    """Refuse a folder with tiles of another geometry, which would be replaced, or mixed with the new ones."""
    for path, geometry in geometries_in(out).items():
        if geometry != settings.geometry:
            raise CarmilError(
                f"{out} holds tiles of {geometry} ({path.name}), not of {settings.geometry}: choose another "
                f"--out, or remove {out / 'patches'} to cut the slides again"
            )


def _earlier_outcome(path: Path, out: Path, words: dict[str, Any]) -> Outcome | None:
    """Return the outcome of an earlier run with the same file and settings, or None."""
    file = tiles_file(out, slide_name(path))
    if not (file.is_file() and _sheet_path(out, path).is_file()):
        return None
    try:
        tiles, more = read_tiles(file), read_more(file)
    except CarmilError:
        return None
    before, now = (SlideFile(facts.get("bytes"), facts.get("mtime")) for facts in (more, words))
    if more.get("settings") != words["settings"] or before.differs_from(now):
        return None
    gone = tuple(more["left_out"].items())
    return Outcome(path, tiles, "", True, float(more["tissue_mm2"]), str(more["mpp_from"]), gone)


def _remove_tiles(path: Path, out: Path) -> bool:
    """Remove the files of an earlier call; return whether there were tiles."""
    file = tiles_file(out, slide_name(path))
    existed = file.is_file()
    file.unlink(missing_ok=True)
    _sheet_path(out, path).unlink(missing_ok=True)
    return existed


def _sheet_path(out: Path, slide: Path) -> Path:
    return out / "sheets" / f"{safe_name(slide_name(slide))}.png"


def _cell(out: Path, outcome: Outcome) -> tuple[str, str, Path | None]:
    if outcome.tiles is None:
        return outcome.name, f"skipped: {outcome.problem.replace(str(outcome.path), '').strip(' :')}", None
    return outcome.name, f"{len(outcome.tiles):,} tiles", _sheet_path(out, outcome.path)


def _write_table(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Write one row per slide; unknown numbers are empty cells."""
    size = ("tile_pixels", "tile_mpp", "mpp", "mpp_from", "width", "height")
    heads = ("slide", "path", "tiles", "tissue_mm2", *RULES, *size, "problem")
    rows: list[Sequence[object]] = [heads]
    for each in outcomes:
        gone, tiles = dict(each.left_out), each.tiles
        if tiles is None:
            numbers: list[object] = [""] * (len(heads) - 3)
        else:
            counts = [gone.get(rule, "") for rule in RULES]
            lengths = [tiles.pixels, f"{tiles.mpp:.6g}", f"{tiles.slide_mpp:.6g}", each.mpp_from]
            numbers = [len(tiles), f"{each.mm2:.4f}", *counts, *lengths, tiles.width, tiles.height]
        rows.append([each.name, str(each.path), *numbers, each.problem])
    write_text(path, csv_text(rows, for_people=True))
