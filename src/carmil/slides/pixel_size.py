"""Micrometres per level-0 pixel: from the file or from the user, never guessed."""

from dataclasses import dataclass
from pathlib import Path

from carmil.errors import CarmilError

SMALLEST, LARGEST = 0.05, 20.0  # micrometres; no scanner is finer, no slide coarser
SKEW = 0.02  # x and y may differ by this share

_MICROMETRES = {"pm": 1e-6, "nm": 1e-3, "µm": 1.0, "um": 1.0, "μm": 1.0, "mm": 1e3, "cm": 1e4, "m": 1e6, "in": 25400.0}


@dataclass(frozen=True)
class FileMpp:
    """Pixel size in a file: micrometres per pixel in x and y, and the place in the file."""

    x: float
    y: float
    place: str

    def problem(self) -> str | None:
        """Return why the value cannot be right, or None."""
        text = f"{self.x:.4g} x {self.y:.4g} um/px ({self.place})"
        if not (SMALLEST <= self.x <= LARGEST and SMALLEST <= self.y <= LARGEST):
            return f"says {text}, which is impossible (outside {SMALLEST} to {LARGEST:g})"
        if abs(self.x - self.y) > SKEW * min(self.x, self.y):
            return f"says {text}: x and y differ by more than {SKEW:.0%}"
        return None


def choose_mpp(
    path: Path, recorded: FileMpp | None, given: float | None, *, objective: float | None = None
) -> tuple[float, str]:
    """Return the mpp to use, and in words where it comes from. A given value takes precedence."""
    if given is not None:
        if not SMALLEST <= given <= LARGEST:
            raise CarmilError(f"mpp {given:g} for {path}: expected {SMALLEST} to {LARGEST:g} micrometres per pixel")
        says = (
            "the file has none"
            if recorded is None
            else f"the file {recorded.problem() or f'says {_mean(recorded):.4g}'}"
        )
        return given, f"given; {says}"
    problem = "does not record its micrometres per pixel" if recorded is None else recorded.problem()
    if recorded is None or problem is not None:
        hint = f" (its objective is {objective:g}x: {10 / objective:g} would be usual)" if objective else ""
        raise CarmilError(
            f"{path} {problem}: give it with --mpp, from the scanner's protocol (40x is often 0.25){hint}"
        )
    return _mean(recorded), f"the file ({recorded.place})"


def micrometres(size: str | None, unit: str | None) -> float | None:
    """Convert a length in OME's notation; None where it is missing, or its unit is no length."""
    factor = _MICROMETRES.get(unit or "µm")
    if size is None or factor is None:
        return None
    try:
        return float(size) * factor
    except ValueError:
        return None


def _mean(recorded: FileMpp) -> float:
    return (recorded.x + recorded.y) / 2
