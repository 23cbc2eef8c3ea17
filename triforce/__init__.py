"""The library under the project's name: `from triforce import LLM`. Hands on the public names of `offload`."""

from typing import TYPE_CHECKING, Any

import offload
from offload import __all__ as __all__

if TYPE_CHECKING:
    from offload import *  # noqa: F403


def __getattr__(name: str) -> Any:
    return getattr(offload, name)  # torch is imported with the first name that needs it


def __dir__() -> list[str]:
    return sorted(__all__)
