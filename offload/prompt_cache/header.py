"""What stands in a block's file beside the tensors. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path

from safetensors import SafetensorError, safe_open

_LATEST = 32503680000.0  # the year 3000, in seconds


class UnusableBlock(Exception):
    """A file that is damaged, or not the block that its name promises."""


@dataclass(frozen=True, slots=True)
class Header:
    """`created` in seconds since the epoch; `prefill_s`: seconds that computing the block took."""

    key: str
    parent: str  # the key of the block before it, "" for the first
    part: str  # whose heads these are, "" for all
    model: str
    label: str  # of the prompt, for people
    created: float
    prefill_s: float

    def texts(self) -> dict[str, str]:
        """As a safetensors file carries it: names of files need not be text."""
        return {name: str(value).encode("utf-8", "replace").decode() for name, value in asdict(self).items()}

    @classmethod
    def read(cls, texts: dict[str, str]) -> Header:
        """Raises UnusableBlock."""
        try:
            numbers = {name: float(texts[name]) for name in ("created", "prefill_s")}
            if not all(0 <= number < _LATEST for number in numbers.values()):
                raise ValueError("a time that cannot be")
            return cls(**{field.name: texts[field.name] for field in fields(cls)} | numbers)
        except (KeyError, ValueError) as error:
            raise UnusableBlock(f"its header is wrong: {error}") from None


def read_header(path: Path) -> Header:
    """The header of a file, without a tensor. Raises FileNotFoundError, UnusableBlock."""
    try:
        with safe_open(path, framework="np") as file:
            return Header.read(file.metadata() or {})
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError) as error:
        raise UnusableBlock(str(error)) from error
