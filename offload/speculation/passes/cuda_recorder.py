"""Record computations as CUDA graphs, and leave the process in order if that fails."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

_WARM_UP = 2  # runs before a recording: libraries choose kernels, compile and allocate memory in the first ones
# What takes the allocator out of capture mode, in torch since 2.8 and before.
_LEAVE_CAPTURE = ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool")


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream that is recorded on: cuBLAS keeps a workspace of up to 32 MiB for every stream."""
    return torch.cuda.Stream(device)


class CudaRecorder:
    """Records computations that share one memory pool: only one of them runs at a time, on one stream.

    After a recording has failed, this process records nothing more: the allocator may be in an unknown state.
    """

    _error: ClassVar[str | None] = None  # of the recording that failed

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = _side_stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Return a callable that replays `run`. Raises what `run` and CUDA raise where it cannot be recorded.

        `run` is called three times. It must give the same result each time, and allocate nothing that it keeps.
        """
        if CudaRecorder._error is not None:
            raise RuntimeError(CudaRecorder._error)
        try:
            graph, out = self._record(run)
        except Exception as error:
            CudaRecorder._error = str(error)
            raise

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay

    def _record(self, run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        try:
            with torch.cuda.stream(self._side):  # restores the current stream, whatever happens in it
                for _ in range(_WARM_UP):
                    run()
                return self._capture(run)
        finally:
            current.wait_stream(self._side)  # what a failed run has stored is overwritten behind it

    def _capture(self, run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # the memory of the warm-up: no other stream and no graph can use it
        with _no_collection():
            # For this thread alone: host attention, loading and downloads go on beside it.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                out = run()
            except BaseException:  # an interrupt too
                with suppress(RuntimeError):  # it repeats the error
                    self._end(graph)
                raise
            self._end(graph)
        return graph, out

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            # Before torch 2.12 the allocator stays in capture mode then: it would never reuse memory that another
            # stream has used, and empty_cache would abort (pytorch/pytorch#180395). Since then it has left, and raises.
            for leave in filter(None, (getattr(torch._C, name, None) for name in _LEAVE_CAPTURE)):
                with suppress(RuntimeError):
                    leave(self._side.device_index, self._pool)
            raise


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no garbage: that could free pinned memory and events, which is not allowed in a recording."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
