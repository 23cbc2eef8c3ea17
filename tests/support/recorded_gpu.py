"""A GPU that runs on the CPU and records what is ordered with what, for tests/support/vector_clocks.py.

Device memory is ordinary memory of which torch is told that it is CUDA's. Threads of a pool are recorded as threads,
but run at once too, so that a recording is the same every time.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.fake_cuda import GPU
from tests.support.recorded_streams import Event, Ran, Recording
from tests.support.vector_clocks import Keep, Site

_BLOCKING = ("nonzero", "_local_scalar_dense", "equal", "is_nonzero")  # the host waits for their result


class _Devices(TorchFunctionMode):
    """Tells of a tensor's device, and copies between devices, as torch for CUDA does."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._to = recording

    def __torch_function__(self, function, classes, args=(), kwargs=None):
        kwargs, to = dict(kwargs or {}), self._to
        if function == Tensor.device.__get__:
            return GPU if to.is_on_device(args[0]) else function(*args)
        if function == Tensor.is_cuda.__get__:
            return to.is_on_device(args[0])
        if function in (Tensor.to, Tensor.cpu, Tensor.cuda):
            return self._moved(function, args, kwargs)
        if function is Tensor.pin_memory:
            return self._pinned(args[0].clone())
        if kwargs.pop("pin_memory", False):
            return self._pinned(function(*args, **kwargs))
        if _is_gpu(kwargs.get("device")):
            kwargs["device"], to.making = torch.device("cpu"), True
        try:
            return function(*args, **kwargs)
        finally:
            to.making = False

    def _pinned(self, x: Tensor) -> Tensor:
        self._to.pinned.add(self._to.memory_of(x))
        return x

    def _moved(self, function, args, kwargs):
        x, *rest = args
        device = {Tensor.cpu: torch.device("cpu"), Tensor.cuda: GPU}.get(function, kwargs.get("device"))
        rest_devices = [each for each in rest if isinstance(each, torch.device | str)]
        device = device or (rest_devices[0] if rest_devices else None)
        if device is None or (_is_gpu(device) == self._to.is_on_device(x) and not kwargs.get("copy")):
            plain = [each for each in rest if each not in rest_devices]
            return Tensor.to(x, *plain, **{k: v for k, v in kwargs.items() if k != "device"}) if plain else x
        self._to.making = _is_gpu(device)
        dtype = next((each for each in rest if isinstance(each, torch.dtype)), kwargs.get("dtype", x.dtype))
        moved = torch.empty(x.shape, dtype=dtype)
        self._to.making = False
        return moved.copy_(x, non_blocking=kwargs.get("non_blocking", False))


class _Accesses(TorchDispatchMode):
    """Records which memory each operation reads and writes."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._to = recording

    def __torch_dispatch__(self, function, classes, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            self._record(function, args, kwargs, out)
        return out

    def _record(self, function, args, kwargs, out) -> None:
        to, (name, writes) = self._to, _signature(function)
        written, read = _tensors(kwargs.get("out")), []
        for is_written, value in zip(writes, args, strict=False):
            (written if is_written else read).extend(_tensors(value))
        known = {x.untyped_storage()._cdata for x in (*read, *written)}
        made = [x for x in _tensors(out) if x.untyped_storage()._cdata not in known]
        inputs = [x for x in (*written, *read) if x.dim() or to.is_on_device(x)]
        on_device = to.making or any(to.is_on_device(x) for x in inputs)
        actor = to.stream.name if on_device else to.thread
        for x in made:
            to.memory_of(x, actor if on_device else None)
        if not made and not written and name not in _BLOCKING:
            return  # a view
        for x in read:  # what the host gives to a kernel is read when it is launched
            by_host = on_device and name != "copy_" and not to.is_on_device(x)
            to.access(to.thread if by_host else actor, x, False, name)
        for x in written:
            to.access(actor, x, True, name)
        for x in made:  # also if it is not filled: the allocator gives a stream what its earlier work may still use
            to.access(actor, x, True, name)
        if on_device and self._blocks(name, args, kwargs, inputs):
            to.block(name)

    def _blocks(self, name, args, kwargs, inputs) -> bool:
        if name == "copy_":
            apart = len({self._to.is_on_device(x) for x in inputs}) == 2
            return apart and not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        by_mask = name.startswith("index") and any(x.dtype == torch.bool for x in _tensors(args[1]))
        return by_mask or name in _BLOCKING


@cache
def _signature(function) -> tuple[str, list[bool]]:
    """Return an operation's name, and of each argument whether it is written to."""
    schema = function._schema
    written = [each.alias_info is not None and each.alias_info.is_write for each in schema.arguments]
    return schema.name.split("::")[1], written


def _tensors(value: object) -> list[Tensor]:
    several = value if isinstance(value, list | tuple) else [value]
    return [x for x in several if isinstance(x, Tensor)]


def _is_gpu(device: object) -> bool:
    return device is not None and torch.device(device).type == "cuda"


@contextmanager
def recorded_gpu(done: bool = False) -> Iterator[Recording]:
    """Within it, tensors can be made on `GPU`; yields the recording."""
    to = Recording(done)

    @contextmanager
    def on(stream):
        before, to.stream = to.stream, stream
        try:
            yield
        finally:
            to.stream = before

    def submit(pool, run, *args):
        return Ran(to, pool._thread_name_prefix, lambda: run(*args))

    def keep(x, stream):
        to.trace.append(
            Keep(to.memory_of(x), stream.name, Site(f"freed memory waits for {stream.name}", "record_stream"))
        )

    driver = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    fakes = {
        "Event": lambda enable_timing=False: Event(to),
        "Stream": to.new_stream,
        "stream": on,
        "current_stream": lambda device=None: to.stream,
        "synchronize": to.synchronize,
        "cudart": lambda: driver,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
    }
    with ExitStack() as stack:
        for name, fake in fakes.items():
            stack.enter_context(patch.object(torch.cuda, name, fake))
        stack.enter_context(patch.object(Tensor, "record_stream", keep))
        stack.enter_context(patch.object(ThreadPoolExecutor, "submit", submit))
        stack.enter_context(patch("offload.kernels.triton.serves", lambda q: False))
        stack.enter_context(patch("offload.kernels.triton.serves_rows", lambda x: False))
        stack.enter_context(_Devices(to))
        stack.enter_context(_Accesses(to))
        yield to
