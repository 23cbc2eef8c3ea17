"""Where the endpoint listens, and what it accepts: checked before anything is loaded. Imports no torch."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from urllib.parse import urlsplit

from offload.errors import SettingsError, TriforceError

from .keys import ENVIRONMENT, ApiKeys

HOST, PORT = "127.0.0.1", 8000
QUEUE = 64  # sequences that may wait
BODY = 1 << 25  # bytes of a request: several times the text of a million tokens
DRAIN = 30  # seconds that running requests have after SIGTERM
CACHE_SCOPES = ("shared", "key")
_NEEDED = {"starlette": "starlette", "uvicorn": "uvicorn", "prometheus_client": "prometheus-client"}


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Where the endpoint listens, who may use it, and its limits.

    Args:
        host, port: the address; port 0 is any free one.
        keys: the API keys; with none, everybody who reaches the address may use it.
        origins: origins of web pages that may use it, beside its own page.
        separates_keys: whether prompts of different keys share nothing that is cached.
        parallel: sequences that run together, a number or "auto".
        queue: sequences that may wait beside those.
        context: tokens of the longest prompt and answer; None for the model's, 128K at most.
        body: bytes of the longest request.
        drain: seconds that running requests have after SIGTERM.
        ignore_unknown: whether fields of requests that nobody knows are passed over, and no errors.
    """

    host: str
    port: int
    keys: ApiKeys
    origins: tuple[str, ...]
    separates_keys: bool
    parallel: int | str
    queue: int
    context: int | None
    body: int
    drain: int
    ignore_unknown: bool = False

    def __post_init__(self) -> None:
        if not self.is_local and not self.keys:
            raise SettingsError(
                f"--host {self.host} is reachable from other machines, and there is no API key",
                f"give --api-key-file FILE or set {ENVIRONMENT}; openssl rand -hex 32 makes a key",
            )
        if self.separates_keys and not self.keys:
            hint = f"give --api-key-file FILE or set {ENVIRONMENT}"
            raise SettingsError("--cache-scope key separates by API key, and there is none", hint)
        for origin in self.origins:
            _check_origin(origin, bool(self.keys))

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches the address."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is this machine's own."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_origin(origin: str, has_keys: bool) -> None:
    if origin == "*":
        if not has_keys:
            raise SettingsError("--cors * lets every web page use the model, and there is no API key", "name the page")
        return
    parts = urlsplit(origin)
    if parts.scheme not in ("http", "https") or not parts.netloc or f"{parts.scheme}://{parts.netloc}" != origin:
        raise SettingsError(f"--cors is {origin!r}", "give a page's origin, such as https://notes.example.org")


def check_installed(needed: Sequence[str] = tuple(_NEEDED)) -> None:
    """Raise TriforceError if a package of the extra `serve` is not installed. Imports none of them."""
    missing = [_NEEDED.get(name, name) for name in needed if find_spec(name) is None]
    if missing:
        raise TriforceError(
            f"triforce serve needs packages that are not installed: {', '.join(missing)}",
            'install them in the folder of triforce: pip install ".[serve]"',
        )
