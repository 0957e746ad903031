"""carmil view: runs, answers and new slides in the browser."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

from carmil.cli.app import app
from carmil.cli.options import Device, DeviceOption, device_named, folder_for, log
from carmil.cli.slides import MppTableOption, RunPresetOption, WeightsOption, need_slides
from carmil.errors import CarmilError

if TYPE_CHECKING:
    from carmil.viewer.preparation import Preparation
    from carmil.viewer.responses import Responses

PORT = 8765
NEEDED = "the viewer needs starlette and uvicorn: pip install 'carmil[viewer]'"


@app.command()
def view(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN|ANSWERS|SLIDE...",
            help="Runs of `carmil train` or `carmil demo`, answers of `carmil slides run` (several are compared), or slides.",
        ),
    ],
    model: Annotated[
        Path | None,
        typer.Option(
            help="For slides: the run that answers. For answers: the run that gave them, if it has been moved."
        ),
    ] = None,
    encoder: Annotated[
        str | None,
        typer.Option(help="For slides: the encoder of the run's features.  [default: as the run records it]"),
    ] = None,
    weights: WeightsOption = None,
    preset: RunPresetOption = None,
    out: Annotated[
        Path | None, typer.Option(help="For slides: folder for tiles, features and answers.  [default: RUN-answers]")
    ] = None,
    device: DeviceOption = "auto",
    slides: Annotated[Path | None, typer.Option(help="Folder of the slide files, to show the tissue.")] = None,
    annotations: Annotated[
        Path | None,
        typer.Option(
            help="Folder of annotations: regions drawn in the viewer are saved there as SLIDE.geojson, and files of other "
            "programs are shown.  [default: RUN-annotations next to the run]"
        ),
    ] = None,
    mpp: Annotated[
        float | None, typer.Option(help="Micrometres per pixel of slides whose files do not record it.")
    ] = None,
    slides_table: MppTableOption = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 for any free port.")] = PORT,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on: by default only this machine; with another address, others need a token."
        ),
    ] = "127.0.0.1",
    token: Annotated[
        str | None, typer.Option(help="Token for access from other machines.  [default: a new one]")
    ] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the address.")] = False,
) -> None:
    """Show runs or slides in the browser: the evidence for and against each prediction, and what would change it.

    A slide of a run is explained by the models that were tested on it, a new slide by all models. Several runs are shown side by
    side. Prints the address of the page and serves it until Ctrl-C. No data leave the machine.

    With --model, slides are tiled, encoded and answered as by `carmil slides run`, with progress on the page; their answers are
    written to OUT, from which the same command shows them immediately. If interrupted, run the same command again to resume.

    Examples:
      carmil view run
      carmil view run --slides slides --port 0 --no-browser
      carmil view run --slides slides --annotations annotations
      carmil view run other_run --slides slides
      carmil view answers
      carmil view new.svs --model run --encoder hf-hub:MahmoodLab/UNI
      carmil view scans --model run --slides-table slides.csv
    """
    access = Access(host=host, port=port, token=token, browser=not no_browser)
    new = _slides_among(paths, model)
    if new:
        if slides is not None:
            raise CarmilError("--slides is for runs; the slides to show are given: leave it out")
        assert model is not None
        _show_slides(
            new,
            model,
            access,
            encoder=encoder,
            weights=weights,
            preset=preset,
            mpp=mpp,
            slides_table=slides_table,
            out=out,
            annotations=annotations,
            device=device,
        )
        return
    given = {
        "--encoder": encoder,
        "--weights": weights,
        "--out": out,
        "--preset": preset,
    }
    if surplus := [name for name, value in given.items() if value is not None]:
        raise CarmilError(f"{surplus[0]} is for slides, but {paths[0]} is not a slide: leave it out, or give a slide")
    if slides_table is not None and slides is None:
        raise CarmilError("--slides-table is for slide files: give their folder with --slides")
    show_folders(paths, access, model=model, slides=slides, annotations=annotations, mpp=mpp, slides_table=slides_table)


@dataclass(frozen=True, kw_only=True)
class Access:
    """Where the viewer listens, and who may connect."""

    host: str = "127.0.0.1"
    port: int = PORT
    token: str | None = None
    browser: bool = True


def serve_run(run: Path) -> None:
    """Show a run on this machine."""
    show_folders([run], Access())


def show_folders(
    folders: Sequence[Path],
    access: Access,
    *,
    model: Path | None = None,
    slides: Path | None = None,
    annotations: Path | None = None,
    mpp: float | None = None,
    slides_table: Path | None = None,
    shown: str = "",
) -> None:
    need_viewer()
    from carmil.viewer.opening import open_folders

    named = " and ".join(map(str, folders))
    _serve(
        f"{named} {'is' if len(folders) == 1 else 'are'} at",
        access,
        open_runs=lambda: open_folders(
            folders,
            slides=slides,
            annotations=annotations,
            model=model,
            mpp=mpp,
            slides_table=slides_table,
            log=log,
        ),
        shown=shown,
    )


def _serve(
    words: str,
    access: Access,
    *,
    open_runs: "Callable[[], Sequence[Responses]]" = tuple,
    preparation: "Preparation | None" = None,
    shown: str = "",
) -> None:
    from carmil.viewer.serve import is_loopback, serve

    def announce(address: str) -> None:
        if not is_loopback(access.host):
            log("other machines can connect: anyone with the address sees the run, and the connection is not encrypted")
        typer.echo(f"{words} {address}  (stop with Ctrl-C)")

    try:
        serve(
            open_runs,
            preparation=preparation,
            shown=shown,
            host=access.host,
            port=access.port,
            token=access.token,
            browser=access.browser,
            log=log,
            announce=announce,
        )
    except KeyboardInterrupt:
        typer.echo("closed")


def need_viewer() -> None:
    """Raise a CarmilError if the extra is not installed."""
    try:
        for name in ("starlette", "uvicorn"):
            import_module(name)
    except ImportError as error:
        if (error.name or "").partition(".")[0] in ("starlette", "uvicorn"):
            raise CarmilError(NEEDED) from None
        raise


def _slides_among(paths: Sequence[Path], model: Path | None) -> list[Path]:
    """Return the paths if they are slides or, with a model, folders of slides; none if they are folders to show."""
    need_viewer()
    from carmil.viewer.opening import is_viewable

    for path in paths:
        if not path.exists():
            raise CarmilError(f"{path} does not exist: expected a run, answers or a slide")
    new = [path for path in paths if path.is_file() or (model is not None and path.is_dir() and not is_viewable(path))]
    if new and len(new) < len(paths):
        other = next(path for path in paths if path not in new)
        raise CarmilError(f"{other} and the slide {new[0]} cannot be shown together: use one command for each")
    if new and model is None:
        raise CarmilError(f"{new[0]} is a file: to show a slide, give the run that answers with --model")
    return new


def _show_slides(
    paths: Sequence[Path],
    model: Path,
    access: Access,
    *,
    encoder: str | None,
    weights: Path | None,
    preset: str | None,
    mpp: float | None,
    slides_table: Path | None,
    out: Path | None,
    annotations: Path | None,
    device: Device,
) -> None:
    """Check everything before the viewer starts, and load the encoder if a slide is not answered yet."""
    need_slides()
    from carmil.explanations.slide_pipeline import are_answered, check_encoder_name, check_pipeline
    from carmil.runs.run import read_run
    from carmil.slides.dicom_series import slide_name
    from carmil.slides.encoders import Precision, encoder_in_store, load_encoder, may_be_encoder
    from carmil.slides.mpp_table import read_mpps
    from carmil.slides.opening import find_slides
    from carmil.viewer.opening import NewSlides, prepare_slides

    found, run, where = find_slides(paths, log=log), read_run(model), device_named(device)
    mpps = None if slides_table is None else read_mpps(slides_table, found)
    out = folder_for(out or model.parent / f"{run.name}-answers")
    own = run.data.encoder
    named = None if own is None else encoder_in_store(own)
    if encoder is not None:
        precision: Precision = "bfloat16" if own is not None and may_be_encoder(own, encoder, "bfloat16") else "float32"
        check_encoder_name(model, encoder, precision)
        named = encoder, precision
    shown = f"#slide={quote(slide_name(found[0]), safe='')}"
    if are_answered(found, run, out, preset=preset, mpp=mpp, mpps=mpps):
        show_folders([out], access, model=model, annotations=annotations, mpp=mpp, shown=shown)
        return
    if named is None:
        raise CarmilError(f"{model} does not record a known encoder ({own or 'none'}): give it with --encoder")
    loaded = load_encoder(named[0], weights=weights, precision=named[1], log=log)
    check_pipeline(run, out, loaded, lambda line: None)
    new = NewSlides(tuple(found), model, out, loaded, preset, mpp, mpps, where, annotations)
    what = f"{found[0].name} is" if len(found) == 1 else f"{len(found)} slides are"
    _serve(f"results are in {out}; {what} at", access, preparation=prepare_slides(new, log=log), shown=shown)
