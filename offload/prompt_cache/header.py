"""The header of a block's file. Imports no torch."""

from __future__ import annotations

import os
import stat
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ..settings.config import EXACT
from .folder import LATEST


class UnusableBlock(Exception):
    """A file that is damaged, or is not the block that its name says."""


@dataclass(frozen=True, slots=True)
class Header:
    """Identity and statistics of a block. `created` in seconds since the epoch, `prefill_s`: seconds of its prefill."""

    key: str
    parent: str  # the key of the block before it, "" for the first
    part: str  # the rank's share of the heads, "" for all
    model: str
    label: str  # display name of the prompt
    created: float
    prefill_s: float
    kv: str = EXACT  # the format of keys and values; files from before there were others do not name it

    def texts(self) -> dict[str, str]:
        """Return safetensors metadata, with bytes that are not UTF-8 (as in file names) replaced."""
        return {name: str(value).encode("utf-8", "replace").decode() for name, value in asdict(self).items()}

    @classmethod
    def read(cls, texts: dict[str, str]) -> Header:
        """Parse safetensors metadata. Raises UnusableBlock."""
        try:
            numbers = {name: float(texts[name]) for name in ("created", "prefill_s")}
            if not all(0 <= number < LATEST for number in numbers.values()):
                raise ValueError("a time out of range")
            texts = {"kv": EXACT} | texts
            return cls(**{field.name: texts[field.name] for field in fields(cls)} | numbers)
        except (KeyError, ValueError) as error:
            raise UnusableBlock(f"its header is wrong: {error}") from None


def read_header(path: Path) -> Header:
    """Read a file's header, without its tensors. Raises FileNotFoundError, UnusableBlock."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for a writer
            raise UnusableBlock("it is not a regular file")
        with safe_open(path, framework="np") as file:
            return Header.read(file.metadata() or {})
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError) as error:
        raise UnusableBlock(str(error)) from error
