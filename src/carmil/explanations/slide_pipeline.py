"""From slides to the answers of a run's models, and to the maps that explain the answers.

OUT/tiles              as `carmil slides tile` writes them
OUT/features           a store
OUT/predictions.csv    the answer for each slide; predictions.parquet
OUT/evidence           as `carmil explain` writes it
OUT/maps/SLIDE         pictures, and GeoJSON for QuPath
OUT/answers.json       the run, and the files of the slides
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pandas as pd

from carmil.bags.geometry import TileGeometry
from carmil.bags.sources import slide_file_at
from carmil.bags.store import is_store, open_store
from carmil.errors import CarmilError
from carmil.evidence.explainers import EXPLAINERS, default_explainer
from carmil.explanations.explain import explain_run
from carmil.files import atomic_folder, safe_name
from carmil.maps.dicom_maps import check_dicom_slides
from carmil.maps.drawing import LONGEST, draw_maps
from carmil.maps.tile_maps import Smoothing
from carmil.progress import Log, count_progress
from carmil.runs.answers import RecordedSlide, forget_answers, is_answers, read_answers, write_answers
from carmil.runs.evidence import check_same_models, read_run_evidence
from carmil.runs.run import Run, read_run
from carmil.runs.slide_evidence import answer_lines, maps_of
from carmil.slides.dicom_series import slide_name
from carmil.slides.encoders import Encoder, Precision, may_be_encoder
from carmil.slides.encoding import Times
from carmil.slides.features import encode_slides, tiles_of
from carmil.slides.opening import open_slide
from carmil.slides.slide import GivenMpp, Tiles
from carmil.slides.tile_cohort import TileSettings, is_cut, tile_slides
from carmil.slides.tiling import tiles_file
from carmil.studies.cohort import log_once
from carmil.studies.evaluate import check_encoder, check_tiles, check_tiling, predict_bags


@dataclass(frozen=True)
class SlideResults:
    """The results of `answer_slides`. answers: one row per slide; tiles: by slide file, for the slides that were
    answered; broken: by slide file, the reason why a slide was not answered.
    """

    answers: pd.DataFrame
    tiles: dict[Path, Tiles]
    times: Times
    broken: dict[Path, str]


@dataclass
class DrawnMaps:
    """The results of `draw_answers`. folders: those of the pictures, by slide; broken: the error, by the file of the
    slide.
    """

    folders: dict[str, Path] = field(default_factory=dict)
    broken: dict[Path, str] = field(default_factory=dict)


def answer_slides(
    slides: Sequence[Path],
    run_folder: Path,
    out: Path,
    encoder: Encoder,
    *,
    tiles: Path | None = None,
    preset: str | None = None,
    mpp: float | None = None,
    mpps: Mapping[Path, float] | None = None,
    calibration: Path | None = None,
    device: str,
    log: Log,
) -> SlideResults:
    """Cut tiles, encode, predict and explain slides.

    An `out` with answers of another run is refused, as its maps would remain beside the new answers. Even if the call
    is interrupted, no answer, evidence or map in `out` belongs to other features than those stored there. tiles: a
    folder of existing tiles. preset: how tissue is found if tiles are cut by this call, by default as for the run's
    tiles. mpp, mpps: as in `tile_slides`. calibration: a folder with calibration slides for prediction sets, by default
    those of the run.
    """
    if tiles is not None and preset is not None:
        raise CarmilError(
            f"--preset {preset} is for cutting tiles, but --tiles {tiles} gives tiles that are cut already: "
            "leave one out"
        )
    log = log_once(log)  # several stages look at the same features
    run = read_run(run_folder)
    check_pipeline(run, out, encoder, log)
    if tiles is None:
        settings = _settings(run, preset, log)
        check_tiling(run, [settings.tiling], str(out / "features"), log)
        with count_progress("cutting", "slides") as on_slide:
            outcomes = tile_slides(slides, out / "tiles", settings, mpp=mpp, mpps=mpps, on_slide=on_slide)
        tiles_by_slide = {one.path: one.tiles for one in outcomes if one.tiles is not None}
        broken = {one.path: one.problem for one in outcomes if one.tiles is None}
    else:
        tiles_by_slide, broken = tiles_of(slides, tiles)
        for cut in tiles_by_slide.values():
            check_tiles(run, cut.geometry, str(tiles_file(tiles, cut.slide)), log)
        check_tiling(run, [cut.tiling for cut in tiles_by_slide.values()], str(out / "features"), log)
    features = encode_slides(
        tiles_by_slide,
        out / "features",
        encoder,
        device=device,
        say=log,
        before_change=partial(forget_answers, out),
    )
    broken |= features.broken
    encoded = {path: cut for path, cut in tiles_by_slide.items() if path not in broken}
    names = [cut.slide for cut in encoded.values()]
    if features.store is None or not names:  # the store may contain slides of earlier calls
        what = "the slide could not" if len(slides) == 1 else f"none of {len(slides)} slides could"
        raise CarmilError(f"{what} be encoded: {next(iter(broken.values()))}")
    store = features.store.path
    answers = predict_bags(run_folder, store, out, device=device, log=log, asked=names, calibration=calibration)
    with atomic_folder(out / "evidence") as aside:
        explain_run(run_folder, aside, bags=store, methods=(), searched=False, device=device, log=log, asked=names)
    recorded = {cut.slide: RecordedSlide(str(path.resolve()), cut.slide_mpp) for path, cut in encoded.items()}
    write_answers(out, run, recorded)
    return SlideResults(answers[answers["slide"].isin(names)], encoded, features.times, broken)


def draw_answers(
    results: SlideResults,
    run_folder: Path,
    out: Path,
    *,
    longest: int = LONGEST,
    smoothing: Smoothing | None = None,
    dicom: bool = False,
) -> DrawnMaps:
    """Draw the maps of slides that `answer_slides` has just answered into `out`.

    longest: pixels of a map's longer side, at most those of the slide. smoothing: that of the drawn maps. dicom: also
    write the evidence as DICOM segmentations, see `check_dicom_output`.
    """
    run, drawn = read_run(run_folder), DrawnMaps()
    with count_progress("drawing", "slides") as on_slide:
        for done, (path, cut) in enumerate(results.tiles.items(), 1):
            try:
                drawn.folders[cut.slide] = _draw(path, cut, out, run, longest, smoothing, dicom)
            except CarmilError as error:
                drawn.broken[path] = str(error)
            on_slide(done, len(results.tiles))
    return drawn


def check_pipeline(run: Run, out: Path, encoder: Encoder, log: Log) -> None:
    """Refuse an `out` with answers of another run, and another encoder than the run's."""
    check_same_models(out / "evidence", run, out)
    check_encoder(run, encoder.name, encoder.width, encoder.name, log, pooling=encoder.pooling)


def are_answered(
    slides: Sequence[Path],
    run: Run,
    out: Path,
    *,
    preset: str | None = None,
    mpp: float | None = None,
    mpps: Mapping[Path, float] | None = None,
) -> bool:
    """Return whether `out` has the run's answers for these files, which have not changed since; refuse another run's answers."""
    check_same_models(out / "evidence", run, out)
    if not is_answers(out) or not is_store(out / "features"):
        return False
    answers, store, settings = (
        read_answers(out),
        open_store(out / "features"),
        _settings(run, preset, lambda line: None),
    )
    try:
        read_run_evidence(run, answers.evidence, data=store.fingerprint)
        answered = set(answers.predictions(run)["slide"])
    except CarmilError:
        return False
    encoded = {entry.id: entry.slide_file for entry in store.entries if entry.id in answered}

    def is_answered(path: Path) -> bool:
        name = slide_name(path)
        return (
            name in encoded
            and name in answers.slides
            and answers.slides[name].path == str(path.resolve())
            and not encoded[name].differs_from(slide_file_at(path))
            and is_cut(path, out / "tiles", settings, mpp=GivenMpp((mpps or {}).get(path), mpp))
        )

    return all(map(is_answered, slides))


def check_dicom_output(slides: Sequence[Path], run_folder: Path) -> None:
    """Refuse `dicom` for slides that are not DICOM, and for a run without signed evidence, before anything is computed."""
    check_dicom_slides(slides)
    run = read_run(run_folder)
    if not EXPLAINERS[default_explainer(run.model())].signed:
        raise CarmilError(
            f"--dicom writes signed evidence, which {run.settings.model!r} of {run_folder} does not have: leave out --dicom"
        )


def check_encoder_name(run_folder: Path, encoder: str, precision: Precision = "float32") -> None:
    """Refuse an encoder by its name and precision, before its weights are downloaded."""
    own_encoder = read_run(run_folder).data.encoder
    if own_encoder is not None and not may_be_encoder(own_encoder, encoder, precision):
        raise CarmilError(
            f"{run_folder} was trained on features of {own_encoder}, not of {encoder} in {precision}: use its encoder "
            "in the same precision"
        )


def _settings(run: Run, preset: str | None, log: Log) -> TileSettings:
    """Return settings to cut tiles as the run's tiles were cut, with defaults for settings that the run does not
    record.

    preset: how tissue is found, in place of the run's. If the run's tiles were chosen in several ways, the most frequent counts.
    """
    default = TileSettings()
    if run.data.tilings:
        default = default.with_tiling(run.data.tilings[0])
    if preset is not None:
        default = replace(default, preset=preset)
    geometry = run.data.geometry.filled_from(TileGeometry(default.pixels, default.mpp))
    if not run.data.geometry.known:
        log(
            f"the run {run.folder} does not record the size of its tiles: they are cut as {geometry}; if it was trained on "
            "others, cut them with `carmil slides tile` and give them with --tiles"
        )
    if not run.data.tilings:
        log(
            f"the run {run.folder} does not record how its tiles were chosen: they are cut with {default.tiling}; if another "
            "preset was used, give it with --preset"
        )
    elif len(run.data.tilings) > 1 and preset is None:
        log(
            f"the tiles of the run {run.folder} were chosen in several ways, here by {default.tiling}; others: "
            f"{'; '.join(run.data.tilings[1:])}; give another --preset if these slides need it"
        )
    assert geometry.tile_pixels is not None and geometry.tile_mpp is not None
    return replace(default, pixels=geometry.tile_pixels, mpp=geometry.tile_mpp)


def _draw(
    path: Path, tiles: Tiles, out: Path, run: Run, longest: int, smoothing: Smoothing | None, dicom: bool
) -> Path:
    """Draw the evidence of the answer, the attention weights, and the evidence of the other classes."""
    maps = maps_of(out / "evidence", tiles, smoothing=smoothing)
    classes = {one.name for one in maps if one.kind == "evidence"}
    if classes and (others := [name for name in run.outputs if name not in classes]):
        maps += maps_of(out / "evidence", tiles, others, smoothing=smoothing)
    folder = out / "maps" / safe_name(tiles.slide)
    with open_slide(path, mpp=tiles.slide_mpp) as slide:
        longest = min(longest, max(slide.width, slide.height))
        answers = [f"Run: {run.name}", *answer_lines(out / "evidence", tiles.slide)]
        draw_maps(slide, tiles, maps, folder, longest=longest, geojson=True, dicom=dicom, answers=answers)
    return folder
