"""CUDA tensors without a GPU: FakeTensorMode knows shapes, dtypes and devices, and computes nothing.

What it finds: tensors on the wrong device, wrong shapes, values that the host waits for (`.item()` raises), copies that
it waits for, how many kernels are launched, and how much device memory is in use at the worst moment. What it cannot
see: streams, events, random numbers, and whether a kernel is right.
"""

from __future__ import annotations

import types
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

GPU = torch.device("cuda", 0)
_ATEN = torch.ops.aten
# Operations that launch no kernel: views, and memory that nobody fills.
_VIEWS = frozenset(
    """
    device prim.device view transpose slice select unsqueeze expand unbind permute alias split split_with_sizes squeeze
    as_strided _unsafe_view _reshape_alias detach t chunk narrow empty empty_like new_empty empty_strided record_stream
    """.split()  # noqa: SIM905
)
# Operations that are views or a copy, as it happens.
_COMPOSITE = frozenset(("to", "reshape", "flatten", "unflatten", "contiguous"))


class _Indexing(TorchFunctionMode):
    """Does by plain operations what a torch without CUDA refuses for its tensors: indexing, `copy_`, `to` and draws."""

    def __torch_function__(self, function, classes, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is Tensor.__getitem__:
            view, index = _view(*args)
            return _ATEN.index.Tensor(view, index) if any(i is not None for i in index) else view
        if function is Tensor.__setitem__:
            return _set(*args)
        if function is Tensor.copy_:
            return _ATEN.copy_(*args[:2], kwargs.get("non_blocking", False))
        if function is Tensor.to and len(args) > 1 and isinstance(args[1], torch.device):
            dtype = {"dtype": args[2]} if len(args) > 2 else {}
            return _ATEN._to_copy(args[0], device=args[1], non_blocking=kwargs.get("non_blocking", False), **dtype)
        if function is Tensor.pin_memory:
            pinned = args[0].clone()
            pinned.is_fake_pinned = True
            return pinned
        if isinstance(kwargs.get("generator"), FakeGenerator):
            return function(*args, **kwargs | {"generator": None})
        return function(*args, **kwargs)


class FakeGenerator(torch.Generator):
    """A generator of the GPU: it draws nothing, as its numbers have no values."""

    def __new__(cls, device=None):
        return super().__new__(cls)


def _view(x: Tensor, key) -> tuple[Tensor, list]:
    """Apply the slices and integers of an index; return the view and the tensors that are left to index with."""
    key = list(key) if isinstance(key, tuple) else [key]
    if any(k is Ellipsis for k in key):
        at = [k is Ellipsis for k in key].index(True)
        key[at : at + 1] = [slice(None)] * (x.dim() - sum(k is not None and k is not Ellipsis for k in key))
    axis, index = 0, []
    for k in key:
        if isinstance(k, int):
            x = _ATEN.select.int(x, axis, k)
            continue
        if k is None:
            x = _ATEN.unsqueeze(x, axis)
        elif isinstance(k, slice) and k != slice(None):
            x = _ATEN.slice.Tensor(x, axis, k.start, k.stop, k.step or 1)
        index.append(k if isinstance(k, Tensor) else None)
        axis += 1
    return x, index


def _set(x: Tensor, key, value) -> None:
    view, index = _view(x, key)
    if any(i is not None for i in index):
        value = value if isinstance(value, Tensor) else torch.full((), value, dtype=view.dtype, device=view.device)
        _ATEN.index_put_(view, index, value)
    elif isinstance(value, Tensor):
        _ATEN.copy_(view, value)
    else:
        _ATEN.fill_.Scalar(view, value)


class Usage(TorchDispatchMode):
    """Counts kernel launches by operation, copies between devices, and device memory in use."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.to_host = 0  # copies from the device that the host waits for
        self.slow_uploads = 0  # copies to the device that the host waits for: blocking, or from pageable memory
        self.now = self.peak = 0  # bytes in use on the device
        self._storages: dict[int, int] = {}

    def __torch_dispatch__(self, function, classes, args=(), kwargs=None):
        name = function._schema.name.split("::")[1]
        if name in _COMPOSITE:  # in inference mode they arrive whole
            with self:
                return function.decompose(*args, **(kwargs or {}))
        out = function(*args, **(kwargs or {}))
        if name not in _VIEWS:
            tensors = [x for x in (*args, *torch.utils._pytree.tree_leaves(out)) if isinstance(x, Tensor)]
            if any(x.device.type == "cuda" for x in tensors):
                self.launches[name] += 1
            if name == "_to_copy":
                self._count_copy(args[0], out, (kwargs or {}).get("non_blocking", False))
            elif name == "copy_":
                self._count_copy(args[1], out, len(args) > 2 and args[2])
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, Tensor) and x.device.type == "cuda":
                self._track(x)
        return out

    def _count_copy(self, source: Tensor, target: Tensor, non_blocking: bool) -> None:
        devices = source.device.type, target.device.type
        if devices == ("cuda", "cpu"):
            self.to_host += 1
        elif devices == ("cpu", "cuda") and not (non_blocking and hasattr(source, "is_fake_pinned")):
            self.slow_uploads += 1

    @property
    def waits(self) -> int:
        """Return how many copies the host has waited for."""
        return self.to_host + self.slow_uploads

    def _track(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        size = self._storages[key] = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self._storages.pop(key, 0)

    @contextmanager
    def of(self) -> Iterator[Counter[str]]:
        """Count the launches of a block alone."""
        before = self.launches.copy()
        found: Counter[str] = Counter()
        yield found
        found.update(self.launches - before)


@contextmanager
def fake_cuda(processors: int = 128, capability: tuple[int, int] = (8, 9)) -> Iterator[Usage]:
    """Within it, tensors can be made on `GPU`, a card with so many processors."""
    properties = types.SimpleNamespace(multi_processor_count=processors, total_memory=24 * 2**30)
    with ExitStack() as stack:
        stack.enter_context(patch("torch.cuda.get_device_capability", lambda device=None: capability))
        stack.enter_context(patch("torch.cuda.get_device_properties", lambda device=None: properties))
        stack.enter_context(patch("torch.Generator", FakeGenerator))
        stack.enter_context(FakeTensorMode())
        stack.enter_context(_Indexing())
        yield stack.enter_context(Usage())


class FakeLink:
    """A `Link` whose copies are only counted."""

    def __init__(self) -> None:
        from offload.memory.link import LinkStatistics

        self.statistics = LinkStatistics()
        self.copies = 0

    def copy(self, pairs, after=None):
        for target, source in pairs:
            assert target.shape == source.shape and target.dtype == source.dtype
            assert target.is_contiguous() and source.is_contiguous()
            assert {target.device.type, source.device.type} == {"cpu", "cuda"}, "a copy that is not over the link"
            self.statistics.bytes += source.nbytes
            self.copies += 1

    def wait(self, ticket) -> None:
        pass

    def finish(self, ticket) -> None:
        pass

    def mark(self) -> None:
        pass

    def seconds(self, ticket) -> float | None:
        return 1e-3
