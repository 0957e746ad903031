"""carmil view: a run in the browser."""

from pathlib import Path
from typing import Annotated

import typer

from carmil.cli.app import app
from carmil.cli.options import log
from carmil.errors import CarmilError

PORT = 8765
NEEDED = "the viewer needs starlette and uvicorn: pip install 'carmil[viewer]'"


@app.command()
def view(
    run: Annotated[Path, typer.Argument(help="A run that `carmil train` or `carmil demo` wrote.")],
    slides: Annotated[Path | None, typer.Option(help="Folder of the slide files, to show the tissue.")] = None,
    mpp: Annotated[
        float | None, typer.Option(help="Micrometres per pixel of slides whose files do not record it.")
    ] = None,
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
    """Show a run in the browser: the evidence for and against each prediction, and what would change it.

    A slide is explained by the models that were tested on it. Prints the address of the page and serves it until Ctrl-C. No data
    leave the machine.

    Examples:
      carmil view run
      carmil view run --slides slides --port 0 --no-browser
    """
    serve_run(run, slides=slides, mpp=mpp, port=port, host=host, token=token, browser=not no_browser)


def serve_run(
    run: Path,
    *,
    slides: Path | None = None,
    mpp: float | None = None,
    port: int = PORT,
    host: str = "127.0.0.1",
    token: str | None = None,
    browser: bool = True,
) -> None:
    try:
        from carmil.viewer.serve import is_loopback, serve
    except ImportError as error:
        if (error.name or "").partition(".")[0] in ("starlette", "uvicorn"):
            raise CarmilError(NEEDED) from None
        raise

    def announce(address: str) -> None:
        if not is_loopback(host):
            log("other machines can connect: anyone with the address sees the run, and the connection is not encrypted")
        typer.echo(f"{run} is at {address}  (stop with Ctrl-C)")

    try:
        serve(
            run, slides=slides, mpp=mpp, host=host, port=port, token=token, browser=browser, log=log, announce=announce
        )
    except KeyboardInterrupt:
        typer.echo("closed")
