"""API keys: from a file or the environment, compared in constant time, and never printed. Imports nothing heavy."""

from __future__ import annotations

import hashlib
import hmac
import os
import shlex
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from offload.errors import SettingsError

ENVIRONMENT = "TRIFORCE_API_KEY"
SHORTEST = 16  # characters: shorter keys can be guessed
_LARGEST = 1 << 20  # bytes of a file of keys


class ApiKeys:
    """The keys that requests may have; without any, a request needs none."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        # Digests have equal lengths: a comparison does not reveal the length of a key.
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def scope(self, given: str) -> str | None:
        """Return a name for the key that was given, which does not reveal it; None if it is not one of the keys."""
        digest = _digest(given)
        is_known = False
        for known in self._digests:  # all of them, whichever fits
            is_known |= hmac.compare_digest(digest, known)
        return hashlib.sha256(digest).hexdigest() if is_known else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(path: Path | None, environ: Mapping[str, str]) -> ApiKeys:
    """Return the keys of a file, one a line, and of the environment. Lines that begin with # are comments.

    Raises SettingsError for a file that cannot be read or has no key, and for keys that are too short.
    """
    keys = [] if path is None else _keys_of(path)
    if environ.get(ENVIRONMENT):
        keys.append(_checked(environ[ENVIRONMENT].strip(), ENVIRONMENT))
    return ApiKeys(keys)


def exposure(path: Path) -> str:
    """Return a warning if other users may read a file of keys, or nothing."""
    mode = path.stat().st_mode
    if os.name != "posix" or not stat.S_ISREG(mode) or not mode & (stat.S_IRGRP | stat.S_IROTH):
        return ""
    return f"other users may read --api-key-file {path}: chmod 600 {shlex.quote(str(path))}"


def _keys_of(path: Path) -> list[str]:
    try:
        with open(path, "rb") as file:
            data = file.read(_LARGEST + 1)
        if len(data) > _LARGEST:  # a part of it would be other keys
            raise SettingsError(f"--api-key-file {path} is larger than 1 MiB", "name a file with one key a line")
        text = data.decode("ascii")
    except OSError as error:
        raise SettingsError(f"--api-key-file {path}: {error.strerror}", "name a file with one key a line") from None
    except UnicodeDecodeError:
        raise SettingsError(f"--api-key-file {path} is not ASCII text", "write one key a line") from None
    lines = [line.strip() for line in text.splitlines()]
    keys = [_checked(line, str(path)) for line in lines if line and not line.startswith("#")]
    if not keys:
        raise SettingsError(f"--api-key-file {path} has no key", "openssl rand -hex 32 makes one")
    return keys


def _checked(key: str, where: str) -> str:
    if len(key) < SHORTEST or not key.isascii() or not key.isprintable() or " " in key:
        hint = f"use at least {SHORTEST} printable ASCII characters without blanks; openssl rand -hex 32 makes a key"
        raise SettingsError(f"a key of {where} is too short, or not plain ASCII", hint)
    return key
