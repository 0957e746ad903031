"""From slides to the answers of a run's models, and to the maps that explain them.

OUT/tiles              as `carmil slides tile` writes them
OUT/features           a store
OUT/predictions.csv    the answer for each slide; predictions.parquet
OUT/evidence           as `carmil explain` writes it
OUT/maps/SLIDE         pictures, and GeoJSON for QuPath
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from carmil.bags.geometry import TileGeometry
from carmil.errors import CarmilError
from carmil.files import atomic_folder, safe_name
from carmil.maps.drawing import LONGEST, draw_maps
from carmil.maps.smoothing import Smoothing
from carmil.progress import Log, count_progress
from carmil.runs.evidence import check_same_models
from carmil.runs.run import Run, read_run
from carmil.runs.slide_evidence import answer_lines, maps_of
from carmil.slides.encoders import Encoder, may_be_encoder
from carmil.slides.encoding import Times
from carmil.slides.features import encode_slides, tiles_of
from carmil.slides.opening import open_slide
from carmil.slides.slide import Tiles
from carmil.slides.tile_cohort import TileSettings, tile_slides
from carmil.slides.tiling import tiles_file
from carmil.studies.cohort import log_once
from carmil.studies.evaluate import check_encoder, check_tiles, predict_bags
from carmil.studies.explain import explain_run

if TYPE_CHECKING:
    import pandas as pd


@dataclass
class SlideResults:
    """answers: one row per slide; maps: the folder of each slide's pictures; broken: the reason, by slide file."""

    answers: "pd.DataFrame"
    times: Times = field(default_factory=Times)
    maps: dict[str, Path] = field(default_factory=dict)
    broken: dict[Path, str] = field(default_factory=dict)


def run_slides(
    slides: Sequence[Path],
    run_folder: Path,
    out: Path,
    encoder: Encoder,
    *,
    tiles: Path | None = None,
    preset: str = "default",
    mpp: float | None = None,
    longest: int = LONGEST,
    smoothing: Smoothing | None = None,
    device: str,
    log: Log,
) -> SlideResults:
    """Cut tiles, encode, predict, explain and draw slides.

    An `out` that holds answers of another run is refused: its maps would stay beside the new answers.
    tiles: a folder of tiles that were cut before. preset: how tissue is found where tiles are cut here. longest: pixels of a
    map's
    longer side, at most those of the slide. smoothing: of the maps that are drawn.
    """
    if tiles is not None and preset != "default":
        raise CarmilError(
            f"--preset {preset} is for tiles that are cut here, and --tiles {tiles} are cut already: leave one out"
        )
    log = log_once(log)  # several stages look at the same features
    run = read_run(run_folder)
    check_same_models(out / "evidence", run, out)
    check_encoder(run, encoder.name, encoder.width, encoder.name, log, pooling=encoder.pooling)
    if tiles is None:
        found, broken = _tiles(slides, out / "tiles", _settings(run, preset, log), mpp)
    else:
        found, broken = tiles_of(slides, tiles)
        for cut in found.values():
            check_tiles(run, cut.geometry, str(tiles_file(tiles, cut.slide)), log)
    features = encode_slides(found, out / "features", encoder, device=device, say=log)
    broken |= features.broken
    asked = [cut.slide for path, cut in found.items() if path not in broken]
    if features.store is None or not asked:  # the store may hold slides of earlier calls
        what = "the slide could not" if len(slides) == 1 else f"none of {len(slides)} slides could"
        raise CarmilError(f"{what} be encoded: {next(iter(broken.values()))}")
    store = features.store.path
    answers = predict_bags(run_folder, store, out, device=device, log=log, asked=asked)
    with atomic_folder(out / "evidence") as aside:
        explain_run(run_folder, aside, bags=store, methods=(), searched=False, device=device, log=log, asked=asked)
    shown = SlideResults(answers[answers["slide"].isin(asked)], features.times, broken=broken)
    with count_progress("drawing", "slides") as on_slide:
        for done, (path, cut) in enumerate(found.items(), 1):
            if path not in broken:
                try:
                    shown.maps[cut.slide] = _draw(path, cut, out, run, longest, smoothing)
                except CarmilError as error:
                    broken[path] = str(error)
            on_slide(done, len(found))
    return shown


def check_encoder_name(run_folder: Path, encoder: str) -> None:
    """Refuse an encoder by its name, before its weights are fetched."""
    mine = read_run(run_folder).data.encoder
    if mine is not None and not may_be_encoder(mine, encoder):
        raise CarmilError(
            f"{run_folder} was trained on features of {mine}, and {encoder} was asked for: use its encoder"
        )


def _settings(run: Run, preset: str, log: Log) -> TileSettings:
    """The settings that cut tiles as the run's were cut; defaults for what a run does not record."""
    default = TileSettings(preset=preset)
    geometry = run.data.geometry.filled_from(TileGeometry(default.pixels, default.mpp))
    if not run.data.geometry.known:
        log(
            f"the run {run.folder} does not record the size of its tiles: they are cut as {geometry}; if it was trained on "
            "others, cut them with `carmil slides tile` and give them with --tiles"
        )
    assert geometry.tile_pixels is not None and geometry.tile_mpp is not None
    return replace(default, pixels=geometry.tile_pixels, mpp=geometry.tile_mpp)


def _tiles(
    slides: Sequence[Path], out: Path, settings: TileSettings, mpp: float | None
) -> tuple[dict[Path, Tiles], dict[Path, str]]:
    with count_progress("cutting", "slides") as on_slide:
        outcomes = tile_slides(slides, out, settings, mpp=mpp, on_slide=on_slide)
    found = {one.path: one.tiles for one in outcomes if one.tiles is not None}
    return found, {one.path: one.problem for one in outcomes if one.tiles is None}


def _draw(path: Path, tiles: Tiles, out: Path, run: Run, longest: int, smoothing: Smoothing | None) -> Path:
    """Draw the evidence of the answer, attention weights, and the evidence of the other classes."""
    maps = maps_of(out / "evidence", tiles, smoothing=smoothing)
    there = {one.name for one in maps if one.kind == "evidence"}
    if there and (others := [name for name in run.classes if name not in there]):
        maps += maps_of(out / "evidence", tiles, others, smoothing=smoothing)
    folder = out / "maps" / safe_name(tiles.slide)
    with open_slide(path, mpp=tiles.slide_mpp) as slide:
        longest = min(longest, max(slide.width, slide.height))
        answers = [f"Run: {run.name}", *answer_lines(out / "evidence", tiles.slide)]
        draw_maps(slide, tiles, maps, folder, longest=longest, geojson=True, answers=answers)
    return folder
