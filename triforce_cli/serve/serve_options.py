"""Where the endpoint listens, whose keys and what it accepts: checked before anything is loaded. Imports no torch."""

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from offload.errors import SettingsError, TriforceError

ENVIRONMENT = "TRIFORCE_API_KEY"
SHORTEST = 16  # characters: shorter keys can be guessed
HOST, PORT = "127.0.0.1", 8000
QUEUE = 64  # sequences that may wait
BODY = 1 << 25  # bytes of a request: several times the text of a million tokens
DRAIN = 30  # seconds that running requests have after SIGTERM
_PACKAGES = ("starlette", "uvicorn", "prometheus-client")  # of the extra `serve`


class ApiKeys:
    """The keys that requests may have; without any, a request needs none."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        self._digests = [_digest(key) for key in keys]  # of equal lengths: to compare them reveals no key's length

    def __bool__(self) -> bool:
        return bool(self._digests)

    def have(self, given: str) -> bool:
        """Return whether a key is one of them, in a time that does not depend on where it differs."""
        digest = _digest(given)
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0  # all are compared


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(path: Path | None, environ: Mapping[str, str]) -> ApiKeys:
    """Return the keys of a file, one a line, and of the environment. Lines that begin with # are comments.

    Raises SettingsError for a file that cannot be read or has no key, and for keys that are too short.
    """
    keys: list[str] = []
    if path is not None:
        try:
            lines = [line.strip() for line in path.read_text("ascii").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not ASCII text"
            raise SettingsError(f"--api-key-file {path}: {reason}", "name a file with one key a line") from None
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise SettingsError(f"--api-key-file {path} has no key", "openssl rand -hex 32 makes one")
    if environ.get(ENVIRONMENT):
        keys.append(environ[ENVIRONMENT].strip())
    if any(len(key) < SHORTEST or not key.isascii() or not key.isprintable() or " " in key for key in keys):
        hint = f"use at least {SHORTEST} printable ASCII characters without blanks; openssl rand -hex 32 makes a key"
        raise SettingsError("an API key is too short, or not plain ASCII", hint)
    return ApiKeys(keys)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Where the endpoint listens, who may use it, and its limits.

    Args:
        host, port: the address; port 0 is any free one.
        keys: the API keys; with none, everybody who reaches the address may use it.
        origins: origins of web pages that may use it, beside its own page.
        parallel: sequences that run together, a number or "auto".
        queue: sequences that may wait beside those.
        context: tokens of the longest prompt and answer; None for the model's, 128K at most.
        body: bytes of the longest request.
        drain: seconds that running requests have after SIGTERM.
        ignore_unknown: whether unknown fields of requests are ignored, and no errors.
    """

    host: str
    port: int
    keys: ApiKeys
    origins: tuple[str, ...]
    parallel: int | str
    queue: int
    context: int | None
    body: int
    drain: int
    ignore_unknown: bool = False

    def __post_init__(self) -> None:
        hint = f"give --api-key-file FILE or set {ENVIRONMENT}; openssl rand -hex 32 makes a key"
        if not self.is_local and not self.keys:
            message = f"--host {self.host} is reachable from other machines, and there is no API key"
            raise SettingsError(message, hint)
        if not self.body:
            raise SettingsError("--max-body is 0", "give a size, such as 100MiB, or leave it out")
        if "*" in self.origins and not self.keys:
            raise SettingsError("--cors * lets every web page use the model, and there is no API key", "name the page")
        for origin in self.origins:
            parts = urlsplit(origin)
            is_page = parts.scheme in ("http", "https") and parts.netloc
            if origin != "*" and not (is_page and f"{parts.scheme}://{parts.netloc}" == origin):
                raise SettingsError(f"--cors is {origin!r}", "give an origin, such as https://notes.example.org")

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches the address."""
        try:
            return self.host.lower() == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def check_installed() -> None:
    """Raise TriforceError if a package of the extra `serve` is not installed. Imports none of them."""
    missing = [package for package in _PACKAGES if find_spec(package.replace("-", "_")) is None]
    if missing:
        raise TriforceError(
            f"triforce serve needs packages that are not installed: {', '.join(missing)}",
            'install them in the folder of triforce: pip install ".[serve]"',
        )
