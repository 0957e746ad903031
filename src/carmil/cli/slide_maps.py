"""carmil slides draw, label: draw maps onto slides, and turn annotations into labels of tiles."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from carmil.cli.options import OutOption, folder_for, log, names_in, numbers_in
from carmil.cli.slides import MppOption, SlidesArgument, SmoothOption, slides
from carmil.errors import CarmilError, unknown
from carmil.words import plural

if TYPE_CHECKING:
    from carmil.maps.mosaic import Box
    from carmil.maps.regions import Region
    from carmil.maps.smoothing import Smoothing
    from carmil.maps.tile_maps import TileMap
    from carmil.slides.slide import Tiles

TilesOption = Annotated[Path, typer.Option(help="Folder that `carmil slides tile` wrote; or one file of tiles.")]
Scaling = Literal["minmax", "rank"]
ANNOTATED = (".geojson", ".json", ".xml", ".tif", ".tiff")


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
            help="Maps, separated by commas: a class (its evidence), factual, counterfactual (attention weights), difference.  "
            "[default: evidence of the answered class, factual, counterfactual]",
        ),
    ] = "",
    scale: Annotated[Scaling, typer.Option(help="How values are mapped to colours.")] = "minmax",
    smooth: SmoothOption = "0",
    longest: Annotated[int, typer.Option(min=16, help="Pixels of a picture's longer side.")] = 4000,
    annotations: Annotated[
        Path | None, typer.Option(help="Contours to draw: GeoJSON, XML or mask; or a folder with one file per slide.")
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
    top: Annotated[int, typer.Option(min=0, help="Number of tiles shown of each end of a map.")] = 8,
    colour: Annotated[bool, typer.Option("--colour", help="Keep the colours of the slide under the map.")] = False,
    mpp: MppOption = None,
) -> None:
    """Draw the evidence of `carmil explain` onto the slides: evidence for and against the prediction, and attention.

    Writes one folder per slide: one picture per map with its legend, all maps side by side, and the tiles with the most evidence
    for and against.

    Examples:
      carmil slides draw slides --evidence run/evidence --tiles tiles --out maps --geojson
      carmil slides draw slides --evidence run/evidence --tiles tiles --out maps --smooth 2
      carmil slides draw a.svs --evidence abmil/evidence --evidence car/evidence --tiles tiles --map factual,tumour
    """
    from carmil.files import safe_name
    from carmil.maps.drawing import draw_maps
    from carmil.maps.smoothing import Smoothing
    from carmil.progress import count_progress
    from carmil.slides.opening import find_slides, open_slide
    from carmil.slides.slide import check_same_size

    boxes = [_box(words) for words in regions or ()] or None
    smoothing = Smoothing.parse(smooth)
    wanted, skipped = names_in(maps), []
    found = find_slides(paths, log=log)
    folder_for(out)
    with count_progress("drawing", "slides") as on_slide:
        for done, path in enumerate(found, 1):
            try:
                folder, cut = out / safe_name(path.stem), _tiles_of(tiles, path.stem)
                drawn = _maps(evidence, cut, wanted, smoothing)
                contours = _annotations(annotations, cut)
                with open_slide(path, mpp=mpp or cut.slide_mpp) as slide:
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
                        grey=not colour,
                        answers=_answers(evidence, path.stem),
                    )
                typer.echo(f"{path.stem}: {plural(len(files), 'file')} in {folder}")
            except CarmilError as error:
                if len(found) == 1:
                    raise
                skipped.append(path.stem)
                log(f"{path.stem} is skipped: {error}")
            on_slide(done, len(found))
    _finish(len(found), skipped)


@slides.command("label")
def slides_label(
    paths: Annotated[list[Path], typer.Argument(metavar="SLIDE...", help="Slides; only their names are needed.")],
    tiles: TilesOption,
    annotations: Annotated[Path, typer.Option(help="GeoJSON, XML of ASAP or Aperio, mask TIFF; or a folder of them.")],
    out: OutOption = Path("labels"),
    rule: Annotated[
        str, typer.Option(help="Overlap that makes a tile positive: any, centre, half, or a share such as 0.25.")
    ] = "half",
    positive: Annotated[
        str, typer.Option(help="Positive classes, separated by commas.  [default: all but exclusions]")
    ] = "",
    complete: Annotated[
        bool,
        typer.Option("--complete", help="Everything positive is annotated: other tiles are negative, not unknown."),
    ] = False,
) -> None:
    """Turn annotations into labels of tiles, the truth that maps are scored against.

    Tiles outside all annotations are unknown and are left out of scores, unless --complete is given. Writes OUT/instances.csv
    and OUT/patch_labels/SLIDE.npy, which `carmil cohort build` reads if they lie next to a folder `features`.

    Examples:
      carmil slides label tumor_001.tif --tiles tiles --annotations tumor_001.xml --complete --out labels
      carmil slides label scans/*.svs --tiles tiles --annotations geojson --positive tumour --rule centre
    """
    from carmil.maps.tile_labels import label_tiles, positive_names
    from carmil.maps.truth_files import write_truth

    folder_for(out)
    wanted, labelled = names_in(positive), []
    cuts = [_tiles_of(tiles, path.stem) for path in paths]
    annotated = [_annotations(annotations, cut) for cut in cuts]
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


def _tiles_of(where: Path, slide: str) -> "Tiles":
    from carmil.slides.tiling import read_tiles, tiles_file

    path = where if where.is_file() else tiles_file(where, slide)
    if not path.is_file():
        raise CarmilError(f"{path}: no tiles of {slide}; cut them with `carmil slides tile`")
    found = read_tiles(path)
    if found.slide != slide:
        raise CarmilError(f"{path} holds the tiles of {found.slide!r}: expected those of {slide!r}")
    if not len(found):
        raise CarmilError(f"{path} holds no tiles: there is nothing to draw or to label")
    return found


def _maps(folders: Sequence[Path], tiles: "Tiles", wanted: Sequence[str], smoothing: "Smoothing") -> "list[TileMap]":
    from carmil.runs.slide_evidence import maps_of

    several = len(folders) > 1
    return [
        one
        for folder in folders
        for one in maps_of(folder, tiles, wanted, model=_model(folder) if several else "", smoothing=smoothing)
    ]


def _answers(folders: Sequence[Path], slide: str) -> list[str]:
    from carmil.runs.slide_evidence import answer_lines

    several = len(folders) > 1
    return [line for folder in folders for line in answer_lines(folder, slide, model=_model(folder) if several else "")]


def _model(folder: Path) -> str:
    """RUN/evidence belongs to RUN."""
    whole = folder.resolve()
    return whole.parent.name if whole.name == "evidence" else whole.name


def _annotations(path: Path | None, tiles: "Tiles") -> "list[Region]":
    from carmil.maps.annotations import read_annotations

    if path is not None and path.is_dir():
        path = next((file for suffix in ANNOTATED if (file := path / f"{tiles.slide}{suffix}").is_file()), None)
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


def _finish(count: int, skipped: Sequence[str]) -> None:
    if skipped:
        typer.echo(
            f"{plural(count - len(skipped), 'slide')} drawn, {len(skipped)} skipped: {', '.join(skipped)}", err=True
        )
        raise typer.Exit(1)
