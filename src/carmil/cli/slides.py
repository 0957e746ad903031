"""carmil slides ...: from whole-slide images to tiles, features and maps."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from carmil.cli.app import app
from carmil.cli.options import (
    CalibrationOption,
    DeviceOption,
    Layout,
    OutOption,
    Precision,
    device_named,
    folder_for,
    log,
    names_in,
)
from carmil.errors import CarmilError, unknown
from carmil.words import plural

if TYPE_CHECKING:
    from carmil.slides.tile_cohort import Outcome

slides = typer.Typer(
    help="""Whole slides: cut them into tiles, encode the tiles, draw maps onto the slides.

    Examples:
      carmil slides tile scans --out tiles
      carmil slides encode scans --tiles tiles --encoder hf-hub:MahmoodLab/UNI --out features
      carmil slides run new.svs --model run --encoder hf-hub:MahmoodLab/UNI --out answers
    """,
    no_args_is_help=True,
)
app.add_typer(slides, name="slides")

SlidesArgument = Annotated[list[Path], typer.Argument(metavar="SLIDE...", help="Slides, or folders of them.")]
SmoothOption = Annotated[
    str,
    typer.Option(
        help="Smooth the drawn maps over a radius in tiles (2) or micrometres (300um), preserving their "
        "total. Regions and classes in GeoJSON are those of the smoothed map; evidence files do not "
        "change."
    ),
]
DicomOption = Annotated[
    bool,
    typer.Option(
        "--dicom", help="Also write the evidence as a DICOM segmentation of the slide, which must be DICOM itself."
    ),
]
MppOption = Annotated[
    float | None,
    typer.Option(
        help="Micrometres per pixel of slides whose files record none; it never overrides a file's own value."
    ),
]
MppTableOption = Annotated[
    Path | None,
    typer.Option(
        "--slides-table",
        help="Table with a column wsi (or slide) and a column mpp: micrometres per pixel slide by slide, in place of their "
        "files' values; empty cells leave them.",
    ),
]


def need_slides() -> None:
    """Raise a CarmilError if the extra is not installed."""
    for name in ("openslide", "tifffile", "skimage"):
        try:
            import_module(name)
        except (ImportError, OSError) as error:
            raise CarmilError(f"slides need `pip install 'carmil[slides]'` ({error}); see carmil doctor") from None


PresetOption = Annotated[str, typer.Option(help="Preset for finding tissue: default, biopsy, resection.")]
RunPresetOption = Annotated[
    str | None,
    typer.Option(help="Preset for finding tissue: default, biopsy, resection.  [default: that of the run's tiles]"),
]
EncoderOption = Annotated[
    str,
    typer.Option(
        help="resnet50, resnet50.caffe, timm/NAME, or hf-hub:OWNER/NAME with a token in HF_TOKEN; see `carmil slides encoders`."
    ),
]
WeightsOption = Annotated[
    Path | None, typer.Option(help="File of the encoder's weights (.safetensors, .pt).  [default: downloaded]")
]

PrecisionOption = Annotated[
    Precision,
    typer.Option(
        help="In which a CPU computes features. bfloat16 is faster on processors that have it (avx512_bf16, amx), and "
        "changes features slightly: they have their own encoder name, and are not mixed with others."
    ),
]


@slides.command("tile")
def slides_tile(
    paths: SlidesArgument,
    out: OutOption = Path("tiles"),
    mpp: MppOption = None,
    slides_table: MppTableOption = None,
    pixels: Annotated[int, typer.Option(help="Pixels of a tile's side.")] = 256,
    tile_mpp: Annotated[float, typer.Option(help="Micrometres per pixel of a tile: 0.5 is 20x.")] = 0.5,
    overlap: Annotated[float, typer.Option(help="Share of the side by which neighbouring tiles overlap.")] = 0.0,
    preset: PresetOption = "default",
    rule: Annotated[
        str, typer.Option(help="Which part of a tile must lie in tissue: centre, or CLAM's four-point.")
    ] = "centre",
    keep: Annotated[str, typer.Option(help="Kinds of tiles to keep, separated by commas: blank, pen, blurred.")] = "",
) -> None:
    """Find the tissue of slides and cut it into tiles, with a sheet to check each by eye; status 1 if a slide was skipped.

    Writes OUT/patches with one file of tiles per slide, OUT/sheets, contact_sheet.png and tiles.csv. If interrupted, run the same
    command again to resume. A slide that cannot be cut is skipped and named. An OUT that holds tiles of another size (pixels,
    um/px) is refused.

    Examples:
      carmil slides tile scans --out tiles
      carmil slides tile biopsy.png --mpp 0.25 --preset biopsy --pixels 224 --keep pen --out tiles
      carmil slides tile scans --slides-table slides.csv --out tiles
    """
    need_slides()
    from carmil.progress import count_progress
    from carmil.slides.mpp_table import read_mpps
    from carmil.slides.opening import find_slides
    from carmil.slides.tile_cohort import TileSettings, tile_slides

    settings = TileSettings(pixels, tile_mpp, overlap, rule, preset, names_in(keep))
    settings.check()
    found = find_slides(paths, log=log)
    mpps = None if slides_table is None else read_mpps(slides_table, found)
    with count_progress("cutting", "slides") as on_slide:
        outcomes = tile_slides(found, folder_for(out), settings, mpp=mpp, mpps=mpps, on_slide=on_slide)
    _print_outcomes(outcomes, mpp)
    typer.echo(f"written: {out / 'tiles.csv'}, contact_sheet.png, patches/, sheets/")
    if any(outcome.tiles is None for outcome in outcomes):
        raise typer.Exit(1)


def _print_outcomes(outcomes: "list[Outcome]", given_mpp: float | None) -> None:
    """Print a table of the slides, then the skipped slides and those whose mpp was overridden, or differs from a given one."""
    from carmil.slides.quality import RULES
    from carmil.tables import ResultTable, print_tables

    lines = []
    for each in outcomes:
        if each.tiles is None:
            continue
        removed = dict(each.left_out)
        counts = [str(removed.get(rule, "kept")) for rule in RULES]
        tile = f"{each.tiles.pixels} px at {each.tiles.mpp:.4g} um/px"
        mpp = f"{each.tiles.slide_mpp:.4g}{' given' if each.mpp_from.startswith('given') else ''}"
        lines.append(
            (each.name, f"{len(each.tiles):,}", f"{each.mm2:.2f}", *counts, tile, mpp, "yes" if each.resumed else "")
        )
        if each.mpp_from.startswith("given; the file says"):
            log(f"{each.name}: {each.tiles.slide_mpp:g} um/px {each.mpp_from}")
        elif given_mpp is not None and not each.mpp_from.startswith("given") and each.tiles.slide_mpp != given_mpp:
            log(
                f"{each.name}: {each.tiles.slide_mpp:g} um/px from {each.mpp_from}; --mpp {given_mpp:g} is for slides that record "
                "none: to correct a file's value, use --slides-table"
            )
    skipped = [each for each in outcomes if each.tiles is None]
    heads = ("slide", "tiles", "tissue mm2", *RULES, "one tile", "slide um/px", "resumed")
    total = sum(len(each.tiles) for each in outcomes if each.tiles is not None)
    title = f"{plural(total, 'tile')} of {plural(len(lines), 'slide')}" + (
        f"; {len(skipped)} skipped" if skipped else ""
    )
    print_tables([ResultTable(title, heads, tuple(lines))])
    for each in skipped:
        log(f"skipped: {each.problem}")


@slides.command("encode")
def slides_encode(
    paths: SlidesArgument,
    encoder: EncoderOption,
    tiles: Annotated[Path, typer.Option(help="Folder of tiles that `carmil slides tile` (or TRIDENT) wrote.")],
    out: Annotated[Path, typer.Option(help="The store to create or to extend.")] = Path("features"),
    weights: WeightsOption = None,
    h5: Annotated[
        tuple[str, Path] | None,
        typer.Option(
            "--h5", metavar="LAYOUT DIR", help="Also write files for other tools: trident or clam, and a folder."
        ),
    ] = None,
    precision: PrecisionOption = "float32",
    device: DeviceOption = "auto",
) -> None:
    """Encode tiles into features, and pack them into a store for training; status 1 if a slide was skipped.

    Writes the store OUT, and with --h5 files for other tools. If interrupted, run the same command again to resume; slides of
    the store are not encoded again, unless the size or modification time of their file has changed.

    Examples:
      carmil slides encode scans --tiles tiles --encoder hf-hub:MahmoodLab/UNI --out features
      carmil slides encode scans --tiles tiles --encoder resnet50 --weights resnet50.pt --h5 trident h5
    """
    need_slides()
    from carmil.slides.encoders import load_encoder
    from carmil.slides.features import encode_slides, tiles_of
    from carmil.slides.opening import find_slides

    tiles_by_slide, broken = tiles_of(find_slides(paths, log=log), tiles)
    where = device_named(device)
    folder_for(out)
    if h5 is not None and h5[0] not in get_args(Layout):
        raise CarmilError(f"--h5: {unknown('layout', h5[0], get_args(Layout))}")
    files = None if h5 is None else (h5[0], folder_for(h5[1]))
    loaded = load_encoder(encoder, weights=weights, precision=precision, log=log)
    encoded = encode_slides(tiles_by_slide, out, loaded, device=where, files=files, say=log)
    typer.echo(encoded.times.summary())
    if encoded.kept:
        typer.echo(f"{plural(len(encoded.kept), 'slide was', 'slides were')} already in the store")
    if encoded.store is not None:
        store = encoded.store
        typer.echo(
            f"written: {out}, {plural(len(store.entries), 'bag')} of {plural(store.rows, 'tile')} x {store.width}, {store.encoder}"
        )
    _skipped(broken | encoded.broken)


@slides.command("encoders")
def slides_encoders() -> None:
    """List the published encoders that carmil knows: features, input, pooling, magnification, and the source of each
    row.

    Prints a table and changes nothing. Any other model of timm or of the hub is pooled by timm's own rule, which
    `encode` logs.

    Example: carmil slides encoders
    """
    from carmil.slides.published_encoders import PUBLISHED_ENCODERS
    from carmil.tables import ResultTable, print_tables

    rows = tuple(row.cells() for row in PUBLISHED_ENCODERS)
    heads = ("--encoder", "loaded by", "features", "pixels", "um/px", "pooling")
    print_tables([ResultTable("published encoders", heads, rows, names=len(heads))])
    for row in PUBLISHED_ENCODERS:
        note = f"{row.note}; " if row.note else ""
        typer.echo(f"{row.name}: {note}mean / std {row.normalisation}; source: {row.source}")


@slides.command("run")
def slides_run(
    paths: SlidesArgument,
    model: Annotated[Path, typer.Option(help="A run that `carmil train` wrote.")],
    encoder: EncoderOption,
    weights: WeightsOption = None,
    tiles: Annotated[
        Path | None,
        typer.Option(
            help="Folder of tiles of the run's size.  [default: cut by this command, as the run's tiles were]"
        ),
    ] = None,
    preset: RunPresetOption = None,
    mpp: MppOption = None,
    slides_table: MppTableOption = None,
    longest: Annotated[int, typer.Option(help="Maximum number of pixels of a map's longer side.")] = 4000,
    smooth: SmoothOption = "0",
    dicom: DicomOption = False,
    calibration: CalibrationOption = None,
    out: OutOption = Path("answers"),
    precision: PrecisionOption = "float32",
    device: DeviceOption = "auto",
) -> None:
    """Predict slides with a run and draw maps that explain the predictions: tiles, features, evidence, pictures, GeoJSON.

    Tiles are cut like those of the run: the same pixels and micrometres per pixel, within 5 %, and the same preset, rule, overlap
    and quality rules. Tiles of another size, another
    encoder, and an OUT with predictions of another run are refused. Writes OUT/predictions.csv, tiles, features
    and evidence, and a folder of maps per slide. If interrupted, run the same command again to resume.

    Examples:
      carmil slides run new.svs --model run --encoder hf-hub:MahmoodLab/UNI --out answers
      carmil slides run series --model run --encoder hf-hub:MahmoodLab/UNI --dicom --out answers
    """
    need_slides()
    from carmil.explanations.slide_pipeline import answer_slides, check_dicom_output, check_encoder_name, draw_answers
    from carmil.maps.tile_maps import Smoothing
    from carmil.runs.run import read_run
    from carmil.slides.encoders import load_encoder
    from carmil.slides.mpp_table import read_mpps
    from carmil.slides.opening import find_slides
    from carmil.studies.predictions import answers_text
    from carmil.studies.subjects import RULE, distinct_rules, rule_lines

    found, where = find_slides(paths, log=log), device_named(device)
    smoothing = Smoothing.parse(smooth)
    check_encoder_name(model, encoder, precision)
    if dicom:
        check_dicom_output(found, model)
    results = answer_slides(
        found,
        model,
        folder_for(out),
        load_encoder(encoder, weights=weights, precision=precision, log=log),
        tiles=tiles,
        preset=preset,
        mpp=mpp,
        mpps=None if slides_table is None else read_mpps(slides_table, found),
        calibration=calibration,
        device=where,
        log=log,
    )
    maps = draw_answers(results, model, out, longest=longest, smoothing=smoothing, dicom=dicom)
    typer.echo(answers_text(results.answers.drop(columns=RULE), read_run(model).target))
    for line in rule_lines(distinct_rules(results.answers)):
        typer.echo(f"- {line}")
    typer.echo(results.times.summary())
    typer.echo(
        f"\nwritten: {out / 'predictions.csv'}, tiles, features, evidence; maps of {plural(len(maps.folders), 'slide')}:"
    )
    for folder in maps.folders.values():
        typer.echo(f"         {folder}")
    _skipped(results.broken | maps.broken)


def _skipped(broken: dict[Path, str]) -> None:
    """List the slides that were skipped, and exit with status 1 if there are any."""
    for why in broken.values():
        log(f"skipped: {why}")
    if broken:
        raise typer.Exit(1)
