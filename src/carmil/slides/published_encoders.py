"""Published encoders for pathology; the table, with the source of every entry, is published_encoders.toml."""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Colour = tuple[float, float, float]
Library = Literal["torchvision", "timm", "transformers", "conch", "its own code"]
UNVERIFIED = "not verified"
CLASS = "class token"
CLASS_AND_MEAN = "class token and mean of patch tokens"


@dataclass(frozen=True)
class PublishedEncoder:
    """One entry of the table.

    name          the value of `--encoder`; case is ignored
    library       loads the network; "its own code" is code of the hub, which carmil never executes
    width         features per tile
    pixels        side of the network's input, in tile pixels
    pooling       how tokens become one vector per tile; None where no public text was found
    mpps          micrometres per pixel of the tiles it was published for; empty where no public text was found
    source        the reference for this entry
    mean, std     of red, green and blue from 0 to 1; None where no public text was found
    architecture  timm's name of the network, or the class in transformers, with `options` to create it
    note          further information for users
    """

    name: str
    library: Library
    width: int
    pixels: int
    pooling: str | None
    mpps: tuple[float, ...]
    source: str
    mean: Colour | None
    std: Colour | None
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    architecture: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    def cells(self) -> tuple[str, ...]:
        """Return the cells of a table row: model, library, width, pixels, micrometres per pixel, pooling."""
        library = "not loaded" if self.library == "its own code" else self.library
        mpps = ", ".join(f"{mpp:g}" for mpp in self.mpps) or UNVERIFIED
        return (self.name, library, str(self.width), str(self.pixels), mpps, self.pooling or UNVERIFIED)

    @property
    def normalisation(self) -> str:
        if self.mean is None or self.std is None:
            return UNVERIFIED
        return " / ".join(", ".join(f"{value:.6g}" for value in colour) for colour in (self.mean, self.std))


def published(name: str) -> PublishedEncoder | None:
    """Return the entry of this name; None if the table has none."""
    return next((row for row in PUBLISHED_ENCODERS if row.name.lower() == name.lower()), None)


def _read_table() -> Iterator[PublishedEncoder]:
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    for row in table["encoder"]:
        colours = table["normalisation"].get(row.pop("normalisation", None), (None, None))
        mean, std = (None if colour is None else tuple(colour) for colour in colours)
        fields = {"pooling": None} | row | {"mpps": tuple(row["mpps"])}
        yield PublishedEncoder(**fields, mean=mean, std=std)


PUBLISHED_ENCODERS = tuple(_read_table())
