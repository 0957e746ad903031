"""How many micrometres a level-0 pixel is: what the file says, or what was given; never a guess."""

from dataclasses import dataclass
from pathlib import Path

from carmil.errors import CarmilError

SMALLEST, LARGEST = 0.05, 20.0  # micrometres; no scanner is finer, no slide coarser
SKEW = 0.02  # x and y may differ by this share

_MICROMETRES = {"pm": 1e-6, "nm": 1e-3, "µm": 1.0, "um": 1.0, "μm": 1.0, "mm": 1e3, "cm": 1e4, "m": 1e6, "in": 25400.0}


@dataclass(frozen=True)
class FileMpp:
    """What a file says: x and y in micrometres per pixel, and where in the file that stands."""

    x: float
    y: float
    place: str

    def problem(self) -> str | None:
        """Why nobody should believe it, if so."""
        told = f"{self.x:.4g} x {self.y:.4g} um/px ({self.place})"
        if not (SMALLEST <= self.x <= LARGEST and SMALLEST <= self.y <= LARGEST):
            return f"says {told}, which is impossible (outside {SMALLEST} to {LARGEST:g})"
        if abs(self.x - self.y) > SKEW * min(self.x, self.y):
            return f"says {told}: x and y differ by more than {SKEW:.0%}"
        return None


def chosen_mpp(
    path: Path, told: FileMpp | None, given: float | None, *, objective: float | None = None
) -> tuple[float, str]:
    """The mpp to use and, in words, where it comes from. What was given wins."""
    if given is not None:
        if not SMALLEST <= given <= LARGEST:
            raise CarmilError(f"mpp {given:g} for {path}: expected {SMALLEST} to {LARGEST:g} micrometres per pixel")
        says = "the file has none" if told is None else f"the file {told.problem() or f'says {_mean(told):.4g}'}"
        return given, f"given; {says}"
    problem = "does not record its micrometres per pixel" if told is None else told.problem()
    if told is None or problem is not None:
        hint = f" (its objective is {objective:g}x: {10 / objective:g} would be usual)" if objective else ""
        raise CarmilError(
            f"{path} {problem}: give it with --mpp, from the scanner's protocol (40x is often 0.25){hint}"
        )
    return _mean(told), f"the file ({told.place})"


def micrometres(size: str | None, unit: str | None) -> float | None:
    """A length as OME writes it; None where it is missing, or in a unit that is no length."""
    factor = _MICROMETRES.get(unit or "µm")
    if size is None or factor is None:
        return None
    try:
        return float(size) * factor
    except ValueError:
        return None


def _mean(told: FileMpp) -> float:
    return (told.x + told.y) / 2
