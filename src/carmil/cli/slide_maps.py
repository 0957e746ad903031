"""carmil slides draw, label: draw maps onto slides, and convert annotations into labels of tiles."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from carmil.cli.options import OutOption, folder_for, log, names_in, numbers_in
from carmil.cli.slides import DicomOption, SlidesArgument, SmoothOption, slides
from carmil.errors import CarmilError, unknown
from carmil.words import plural

if TYPE_CHECKING:
    from carmil.maps.mosaic import Box
    from carmil.maps.regions import Region
    from carmil.slides.slide import Tiles

TilesOption = Annotated[Path, typer.Option(help="Folder that `carmil slides tile` wrote; or one file of tiles.")]
Scaling = Literal["minmax", "rank"]


@slides.command("draw")
def slides_draw(
    paths: SlidesArgument,
    evidence: Annotated[
        list[Path],
        typer.Option(help="Folder that `carmil explain` wrote. Repeat to compare several in one figure."),
    ],
    tiles: TilesOption,
    out: OutOption = Path("maps"),
    maps: Annotated[
        str,
        typer.Option(
            "--map",
            help="Maps, separated by commas: a class, or risk or another output (its evidence), factual, counterfactual "
            "(attention weights), difference.  [default: evidence of the answered class, factual, counterfactual]",
        ),
    ] = "",
    scale: Annotated[Scaling, typer.Option(help="Scale from values to colours.")] = "minmax",
    smooth: SmoothOption = "0",
    longest: Annotated[int, typer.Option(min=16, help="Pixels of a picture's longer side.")] = 4000,
    annotations: Annotated[
        Path | None,
        typer.Option(help="Contours to draw: GeoJSON, JSON, XML or mask; or a folder with one file per slide."),
    ] = None,
    regions: Annotated[
        list[str] | None,
        typer.Option(
            "--region",
            help="X,Y,WIDTH,HEIGHT of a detail, in level-0 pixels.  [default: the largest evidence, for or against]",
        ),
    ] = None,
    geojson: Annotated[
        bool,
        typer.Option("--geojson", help="Also write GeoJSON for QuPath: tiles with values, regions for and against."),
    ] = False,
    ome_tiff: Annotated[bool, typer.Option("--ome-tiff", help="Also write pyramidal OME-TIFF.")] = False,
    dicom: DicomOption = False,
    top: Annotated[int, typer.Option(min=0, help="Number of tiles shown for each end of a map.")] = 8,
    colour: Annotated[bool, typer.Option("--colour", help="Keep the colours of the slide under the map.")] = False,
    mpp: Annotated[float | None, typer.Option(hidden=True, help="Ignored: the tiles record it.")] = None,
) -> None:
    """Draw the evidence of `carmil explain` onto the slides: evidence for and against the prediction, and attention.

    Writes one folder per slide: one picture per map with its legend, all maps side by side, and the tiles with the most evidence
    for and against.

    Examples:
      carmil slides draw slides --evidence run/evidence --tiles tiles --out maps --geojson
      carmil slides draw slides --evidence run/evidence --tiles tiles --out maps --smooth 2
      carmil slides draw dicom --evidence run/evidence --tiles tiles --out maps --dicom
      carmil slides draw a.svs --evidence abmil/evidence --evidence car/evidence --tiles tiles --map factual,tumour
    """
    from carmil.files import safe_name
    from carmil.maps.drawing import draw_maps
    from carmil.maps.tile_maps import Smoothing
    from carmil.progress import count_progress
    from carmil.runs.slide_evidence import answer_lines, check_maps, maps_of
    from carmil.slides.dicom_series import slide_name
    from carmil.slides.opening import find_slides, open_slide
    from carmil.slides.slide import check_same_size

    boxes = [_box(words) for words in regions or ()] or None
    named = [(folder, _model(folder) if len(evidence) > 1 else "") for folder in evidence]
    smoothing = Smoothing.parse(smooth)
    wanted, skipped = names_in(maps), []
    found = find_slides(paths, log=log)
    for of in evidence:
        check_maps(of, [slide_name(path) for path in found], wanted)
    folder_for(out)
    with count_progress("drawing", "slides") as on_slide:
        for done, path in enumerate(found, 1):
            name = slide_name(path)
            try:
                folder, cut = out / safe_name(name), _tiles_of(tiles, name)
                drawn = [
                    one
                    for folder_of, model in named
                    for one in maps_of(folder_of, cut, wanted, model=model, smoothing=smoothing)
                ]
                answers = [line for of, model in named for line in answer_lines(of, name, model=model)]
                contours = _annotations(annotations, cut)
                with open_slide(path, mpp=cut.slide_mpp) as slide:
                    check_same_size(slide, cut.width, cut.height)
                    files = draw_maps(
                        slide,
                        cut,
                        drawn,
                        folder,
                        scale=scale,
                        longest=longest,
                        annotations=contours,
                        regions=boxes,
                        top=top,
                        geojson=geojson,
                        ome_tiff=ome_tiff,
                        dicom=dicom,
                        grey=not colour,
                        answers=answers,
                    )
                typer.echo(f"{name}: {plural(len(files), 'file')} in {folder}")
            except CarmilError as error:
                if len(found) == 1:
                    raise
                skipped.append(name)
                log(f"{name} is skipped: {error}")
            on_slide(done, len(found))
    if skipped:
        drawn_slides = plural(len(found) - len(skipped), "slide")
        typer.echo(f"{drawn_slides} drawn, {len(skipped)} skipped: {', '.join(skipped)}", err=True)
        raise typer.Exit(1)


@slides.command("label")
def slides_label(
    paths: Annotated[list[Path], typer.Argument(metavar="SLIDE...", help="Slides; only their names are needed.")],
    tiles: TilesOption,
    annotations: Annotated[
        Path,
        typer.Option(
            help="GeoJSON, JSON of HistomicsUI, XML of ASAP or Aperio, mask TIFF or PNG; or a folder of them."
        ),
    ],
    out: OutOption = Path("labels"),
    rule: Annotated[
        str, typer.Option(help="Overlap that makes a tile positive: any, centre, half, or a share such as 0.25.")
    ] = "half",
    positive: Annotated[
        str, typer.Option(help="Positive classes, separated by commas.  [default: all but exclusions]")
    ] = "",
    classes: Annotated[
        list[str] | None,
        typer.Option(
            "--class",
            metavar="VALUE=NAME",
            help="Name of a mask's number or colour, or of a class of annotations; without NAME it is left out. Repeatable.",
        ),
    ] = None,
    complete: Annotated[
        bool,
        typer.Option("--complete", help="Everything positive is annotated: other tiles are negative, not unknown."),
    ] = False,
) -> None:
    """Convert annotations into labels of tiles, the truth that maps are scored against.

    Tiles outside all annotations are unknown and are left out of scores, unless --complete is given. Writes
    OUT/instances.csv and OUT/patch_labels/SLIDE.npy, which `carmil cohort build` reads if they lie next to a folder
    `features`.

    Examples:
      carmil slides label tumor_001.tif --tiles tiles --annotations tumor_001.xml --complete --out labels
      carmil slides label scans/*.svs --tiles tiles --annotations geojson --positive tumour --rule centre
      carmil slides label a.svs --tiles tiles --annotations a.png --class "#ff0000=tumour" --class "#ffffff="
    """
    from carmil.maps.tile_labels import label_tiles, positive_names, write_truth
    from carmil.slides.dicom_series import slide_name

    folder_for(out)
    wanted, labelled = names_in(positive), []
    cuts = [_tiles_of(tiles, slide_name(path)) for path in paths]
    annotated = _renamed([_annotations(annotations, cut) for cut in cuts], classes or [])
    known = {region.name for regions in annotated for region in regions}
    for name in wanted:
        if name not in known:
            raise CarmilError(f"--positive: {unknown('class', name, known)}")
    for cut, regions in zip(cuts, annotated, strict=True):
        if not regions and not complete:
            raise CarmilError(f"{cut.slide} has no annotations in {annotations}: leave it out, or give --complete")
        names = positive_names(regions, wanted)
        found = label_tiles(cut, regions, positive=names, rule=rule, complete=complete)
        labelled.append((cut, found))
        counts = [int((found.labels == value).sum()) for value in (1, 0)]
        typer.echo(
            f"{cut.slide}: {counts[0]:,} tiles positive ({', '.join(names) or 'nothing annotated'}; rule {rule}), "
            f"{counts[1]:,} negative, {len(cut) - sum(counts):,} unknown"
        )
    for line in write_truth(labelled, out):
        typer.echo(line)


def _renamed(annotated: "list[list[Region]]", renamings: list[str]) -> "list[list[Region]]":
    """Return the annotations of all slides with the classes of VALUE=NAME renamed, and those of VALUE= left out."""
    known = {region.name for regions in annotated for region in regions}
    names = {}
    for words in renamings:
        value, equals, name = words.partition("=")
        if not equals:
            raise CarmilError(f"--class {words}: expected VALUE=NAME, for instance 1=tumour")
        if value not in known:
            raise CarmilError(f"--class {words}: {unknown('class', value, known)}")
        names[value] = name
    return [
        [
            replace(region, name=names.get(region.name, region.name))
            for region in regions
            if names.get(region.name) != ""
        ]
        for regions in annotated
    ]


def _tiles_of(where: Path, slide: str) -> "Tiles":
    from carmil.slides.tiling import read_tiles, tiles_file

    path = where if where.is_file() else tiles_file(where, slide)
    if not path.is_file():
        raise CarmilError(f"{path} has no tiles of {slide}: cut them with `carmil slides tile`")
    tiles_of_slide = read_tiles(path)
    if tiles_of_slide.slide != slide:
        raise CarmilError(f"{path} holds the tiles of {tiles_of_slide.slide!r}: expected those of {slide!r}")
    if not len(tiles_of_slide):
        raise CarmilError(f"{path} contains no tiles: expected at least one")
    return tiles_of_slide


def _model(folder: Path) -> str:
    """Return the name of the run: RUN for RUN/evidence."""
    resolved = folder.resolve()
    return resolved.parent.name if resolved.name == "evidence" else resolved.name


def _annotations(path: Path | None, tiles: "Tiles") -> "list[Region]":
    from carmil.files import safe_name
    from carmil.maps.annotations import SUFFIXES, read_annotations

    if path is not None and path.is_dir():
        # The viewer saves regions under safe names. The name of a DICOM slide comes from its file and may be a path.
        names = [name for name in (tiles.slide, safe_name(tiles.slide)) if Path(name).name == name]
        files = [path / f"{name}{suffix}" for suffix in SUFFIXES for name in names]
        path = next((file for file in files if file.is_file()), None)
    return [] if path is None else read_annotations(path, width=tiles.width, height=tiles.height)


def _box(words: str) -> "Box":
    from carmil.bags.geometry import FARTHEST

    numbers = numbers_in("--region", words, float)
    if len(numbers) != 4 or min(numbers[2:]) <= 0 or not all(abs(number) < FARTHEST for number in numbers):
        raise CarmilError(
            f"--region {words}: expected X,Y,WIDTH,HEIGHT in level-0 pixels, numbers below {FARTHEST:g}, the last two above 0"
        )
    x, y, width, height = numbers
    return (x, y, x + width, y + height)
