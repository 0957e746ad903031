"""HTML pages from the templates in pages/: text is escaped, pictures are embedded, files appear complete."""

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
    """Show commands between backticks as code."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(words))))


def embedded(picture: Path | bytes) -> str:
    """A PNG, a file or bytes, as a data URI."""
    found = picture if isinstance(picture, bytes) else picture.read_bytes()
    return f"data:image/png;base64,{base64.b64encode(found).decode()}"
