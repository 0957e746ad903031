"""A page of HTML from one of the templates in pages/: words are shown as words, pictures are in it, it is whole or not there."""

import base64
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from carmil.files import write_text

if TYPE_CHECKING:
    from markupsafe import Markup


def write_page(path: Path, template: str, **values: Any) -> None:
    from jinja2 import Environment, PackageLoader

    pages = Environment(
        loader=PackageLoader("carmil.report", "pages"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    pages.filters |= {"codes": codes, "embedded": embedded}
    write_text(path, pages.get_template(template).render(**values))


def codes(words: str) -> "Markup":
    """Commands between backticks as the page shows them."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(words))))


def embedded(picture: Path | bytes) -> str:
    """A PNG, of a file or as it is, as a page holds it."""
    found = picture if isinstance(picture, bytes) else picture.read_bytes()
    return f"data:image/png;base64,{base64.b64encode(found).decode()}"
