"""The page at /: files of this package, which load nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from importlib.resources import files
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_SCRIPTS = ("page.js", "api.js", "thread.js", "markdown.js")
_TYPES = {"index.html": "text/html", "page.css": "text/css"} | dict.fromkeys(_SCRIPTS, "text/javascript")
# The page runs its own script and style alone, and talks to its own server alone.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

_NAMES = {"/" if name == "index.html" else f"/{name}": name for name in _TYPES}
PATHS = frozenset(_NAMES)


def page_routes() -> list[Route]:
    """Return the routes of the page and of what it loads."""
    return [Route(path, _file(name), methods=["GET"]) for path, name in _NAMES.items()]


def _file(name: str) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    content = (files(__package__) / "page" / name).read_bytes()

    async def get(request: Request) -> Response:
        return Response(content, headers={"content-security-policy": POLICY}, media_type=_TYPES[name])

    return get
