"""Lines of the table of check_gpu.py, and comparisons with what was predicted. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable

Line = tuple[str, str, str]  # what, value, remark

LIMIT = 1.25  # measured / predicted beyond which, either way, a comparison is off
GIB = 2**30


class Skipped(Exception):
    """Raised by a part that cannot run here; the message is the reason."""


class Rows(list[Line]):
    """Lines of one part of the table: what, value, remark; `comparisons` has the numbers of those with a prediction.

    Each line is given to `told` when it is added: what kills the part does not lose it.
    """

    def __init__(self, told: Callable[[Line], object] = lambda line: None) -> None:
        super().__init__()
        self.comparisons: list[dict] = []
        self.slower = 0  # warnings that something ran slower than it could
        self._told = told

    def append(self, line: Line) -> None:
        """Add a line."""
        super().append(line)
        self._told(line)

    @property
    def off(self) -> list[str]:
        """Return the names of the comparisons that are off."""
        return [each["what"] for each in self.comparisons if each["off"]]

    def add(self, what: str, value: str, remark: str = "") -> None:
        """Add a line without a prediction."""
        self.append((what, value, remark))

    def agree(self, what: str, error: float, most: float) -> None:
        """Add a relative error. Raises ArithmeticError if it is more than `most`, or no number."""
        if not error <= most:
            raise ArithmeticError(f"{what}: an error of {error:.1e}, where {most:g} is allowed")
        self.add(what, f"error {error:.1e}", f"allowed {most:g}")

    def compare(self, what: str, measured: float, predicted: float, unit: str = "ms", remark: str = "") -> None:
        """Add a measured value with its prediction: seconds shown in `unit` "ms" or "s", or a factor ("x")."""
        ratio = measured / predicted
        shown, expected = (f"{value * (1e3 if unit == 'ms' else 1):.2f} {unit}" for value in (measured, predicted))
        verdict = f"predicted {expected}, measured / predicted {ratio:.2f}"
        self.append((what, shown, f"{verdict}, {remark}" if remark else verdict))
        self._keep(what, measured, predicted, not 1 / LIMIT <= ratio <= LIMIT)

    def compare_memory(self, what: str, peak: int, planned: int) -> None:
        """Add peak memory in bytes, which is off if it exceeds the plan."""
        verdict = f"planned {planned / GIB:.2f} GiB, measured / planned {peak / planned:.2f}"
        self.append((what, f"{peak / GIB:.2f} GiB", verdict))
        self._keep(what, peak, planned, peak > planned)

    def _keep(self, what: str, measured: float, predicted: float, off: bool) -> None:
        ratio = round(measured / predicted, 3)
        self.comparisons.append(
            {"what": what, "measured": measured, "predicted": predicted, "ratio": ratio, "off": off}
        )
