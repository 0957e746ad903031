"""HTML pages from the templates in pages/: text is escaped, pictures are embedded, files are replaced atomically."""

import base64
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape

from carmil.files import write_text


def write_page(path: Path, template: str, **values: Any) -> None:
    write_text(path, PAGES.get_template(template).render(**values))


def codes(words: str) -> Markup:
    """Format text between backticks as code."""
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(words))))


def embedded(picture: Path | bytes, kind: str = "png") -> str:
    """Return a picture, a file or bytes, as a data URI."""
    content = picture if isinstance(picture, bytes) else picture.read_bytes()
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


PAGES = Environment(
    loader=PackageLoader("carmil.report", "pages"), autoescape=True, trim_blocks=True, lstrip_blocks=True
)
PAGES.filters |= {"codes": codes, "embedded": embedded}
PLOTS: Any = PAGES.get_template("plots.html").module  # its macros
