"""Notes on the parts of documents that earlier runs have finished, on disk."""

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from offload.parallel import Group
from offload.system.files import TEMPORARY, replace_file

from ..distributed.rank import broadcast

_EXPIRY = 30 * 24 * 3600  # seconds after which a part that no run has used again is removed


class FinishedParts:
    """Texts by model, settings and prompt, in a folder that only its owner can read.

    If the folder cannot be written, nothing is saved, one warning is printed, and the run continues.
    """

    def __init__(self, home: Path, facts: Any, warn: Callable[[str], None], group: Group | None = None) -> None:
        """`facts` is everything that a text depends on beside its prompt, for JSON; rank 0 saves for its group."""
        self._group, self._folder, self._warn = group, home / "parts", warn
        self._facts = json.dumps(facts, sort_keys=True, default=str)
        self._used: set[Path] = set()
        for path in [*self._folder.glob("*.json"), *self._folder.glob(f"{TEMPORARY}*")]:
            with suppress(OSError):  # another process was quicker
                if time.time() - path.stat().st_mtime > _EXPIRY:
                    path.unlink()

    @property
    def any_used(self) -> bool:
        """Return whether this run has found or saved any."""
        return bool(self._used)

    def find(self, ids: list[int]) -> str | None:
        """Return the text for a prompt, or None."""
        return broadcast(self._group, lambda: self._find(ids))

    def _find(self, ids: list[int]) -> str | None:
        path = self._path(ids)
        try:
            text = str(json.loads(path.read_text("utf-8"))["text"])
        except (OSError, ValueError, KeyError, TypeError):  # missing or damaged: generated again
            return None
        self._used.add(path)
        return text

    def save(self, ids: list[int], text: str) -> None:
        """Save a text whole or not at all, even if the power fails."""
        if self._group is not None and self._group.rank > 0:
            return
        path = self._path(ids)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(path, json.dumps({"text": text}, ensure_ascii=False).encode())
            self._used.add(path)
        except OSError as error:
            self._warn(f"finished parts cannot be saved in {self._folder}: {error.strerror or error}")
            self._warn = lambda text: None

    def clear(self) -> None:
        """Remove the parts that this run has used, once the whole summary has succeeded."""
        for path in self._used:
            with suppress(OSError):  # it will expire
                path.unlink(missing_ok=True)

    def _path(self, ids: list[int]) -> Path:
        digest = hashlib.sha256(f"{self._facts}\n{ids}".encode())
        return self._folder / f"{digest.hexdigest()}.json"
