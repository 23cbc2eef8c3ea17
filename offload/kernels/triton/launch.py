"""The decorator that makes a kernel's launch an operation of torch."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

_library = torch.library.Library("triforce", "DEF")
_Launch = TypeVar("_Launch", bound=Callable[..., None])


def operation(*written: str) -> Callable[[_Launch], _Launch]:
    """Make a launch `torch.ops.triforce.NAME`; `written` are the names of the tensors that it writes to.

    It runs on a GPU, and on the CPU in Triton's interpreter. As an operation it is seen by dispatch modes, and under
    FakeTensorMode nothing is launched.
    """

    def register(launch: _Launch) -> _Launch:
        name = launch.__name__
        _library.define(name + torch.library.infer_schema(launch, mutates_args=written))
        for key in ("CUDA", "CPU"):
            _library.impl(name, launch, key)
        _library.impl(name, lambda *_, **__: None, "Meta")
        call = getattr(torch.ops.triforce, name)
        call.__doc__, call.__signature__ = launch.__doc__, inspect.signature(launch)
        return cast(Any, call)

    return register


def block(width: int) -> int:
    """Return the power of two from `width` on: sizes of a kernel's blocks."""
    return 1 << (width - 1).bit_length()
