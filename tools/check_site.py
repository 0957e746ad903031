"""Check that the built documentation loads nothing from other servers: python tools/check_site.py site

Links to other sites are allowed; scripts, pictures, styles and fonts from other sites are not, nor are equations left as LaTeX.
"""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

FETCHED = {
    "script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src", "embed": "src",
    "object": "data", "form": "action",
}  # fmt: skip
NOT_FETCHED = {"canonical", "prev", "next", "alternate"}
OUTSIDE = re.compile(r"\s*(?:https?:)?//", re.IGNORECASE)
IN_A_STYLE = re.compile(r"(?:url\(|@import)\s*['\"]?\s*(?:https?:)?//[^)'\"\s]+", re.IGNORECASE)


class Page(HTMLParser):
    """Collects what a browser would fetch from elsewhere as it opens the page."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        address = given.get(FETCHED.get(tag, ""), "")
        if tag == "link" and not set(given.get("rel", "").split()) & NOT_FETCHED:
            address = given.get("href", "")
        if OUTSIDE.match(address):
            self.asked.append(f"<{tag}> {address}")
        self.asked += IN_A_STYLE.findall(given.get("style", ""))


def asked_outside(site: Path) -> list[str]:
    """FILE: what, for everything that is asked of the outside, and for every equation that is not drawn."""
    found = []
    for file in sorted(site.rglob("*.html")):
        page = Page()
        text = file.read_text(encoding="utf-8")
        page.feed(text)
        found += [f"{file.relative_to(site)}: {what}" for what in page.asked]
        if "arithmatex" in text:
            found.append(f"{file.relative_to(site)}: an equation that is still LaTeX")
    for file in sorted(site.rglob("*.css")):
        found += [f"{file.relative_to(site)}: {what}" for what in IN_A_STYLE.findall(file.read_text(encoding="utf-8"))]
    return found


if __name__ == "__main__":
    problems = asked_outside(Path(sys.argv[1]))
    print("\n".join(problems) or f"{sys.argv[1]}: no page asks anything of the outside")
    sys.exit(bool(problems))
