"""The slide file that features were made from, recorded with them so that another file of the same name is noticed."""

from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class SlideFile:
    """Size in bytes, modification time in seconds, and width and height in level-0 pixels; None where not recorded."""

    slide_bytes: int | None = None
    slide_mtime: float | None = None
    slide_width: int | None = None
    slide_height: int | None = None

    def differs_from(self, other: "SlideFile") -> bool:
        """Whether a number that both record differs."""
        pairs = [(getattr(self, field.name), getattr(other, field.name)) for field in fields(self)]
        return any(None not in pair and pair[0] != pair[1] for pair in pairs)


NOT_RECORDED = SlideFile()


def slide_file_at(path: Path, *, width: int | None = None, height: int | None = None) -> SlideFile:
    """The record of the file at `path`, as far as the file system knows it."""
    try:
        facts = path.stat()
    except OSError:  # reported when the slide is opened
        return SlideFile(slide_width=width, slide_height=height)
    # Archives may set the time to 0, which means nothing.
    return SlideFile(facts.st_size, facts.st_mtime if facts.st_mtime > 0 else None, width, height)
