"""Convert equations of the documentation to MathML, which a browser draws without any script or font."""

import html
import re

from latex2mathml.converter import convert

EQUATION = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, **_: object) -> str:
    """What arithmatex has left in a page: \\(...\\) within a line, \\[...\\] on lines of its own."""
    return EQUATION.sub(drawn, content)


def drawn(found: re.Match[str]) -> str:
    return convert(html.unescape(found[3]).strip(), display="inline" if found[2] == "(" else "block")
