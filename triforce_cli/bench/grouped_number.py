"""Numbers with thousands separators, where commas may also separate several. Imports nothing heavy."""

from __future__ import annotations


class Grouped(int):
    """A number that was written in groups of three digits, which may have been meant as a list."""

    @property
    def hint(self) -> str:
        """Return how to write the list."""
        several = "two" if self < 10**6 else "several"
        return f'for {several} contexts: --context "{self:,}"'.replace(",", ", ")
