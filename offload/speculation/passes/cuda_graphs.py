"""Forward passes of a few rows with fixed shapes: recorded once as CUDA graphs, and replayed.

A pass runs a thousand small operations. To launch them one by one takes the host longer than the GPU needs to run them;
a CUDA graph launches them at once. The inputs that change from pass to pass are loaded into tensors before.
"""

import gc
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, cast

import torch
from torch import Tensor

from ...caches.protocol import KVCache, StaticCache, StaticStep
from ...errors import Degraded
from ...memory.tree_attention import Tree
from ...model.decoder import Model
from ...settings.config import LONGEST_GAMMA

_WARM_UP = 2  # runs before a recording: libraries choose kernels, compile and allocate memory in the first ones
# The functions that take the allocator out of capture mode, in torch since 2.8 and before.
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


Record = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]


def padded(rows: int) -> int:
    """Return the number of rows that a pass of `rows` is recorded with: the next power of two."""
    return 1 << (rows - 1).bit_length()


@dataclass(slots=True)
class _Recording:
    """A pass of a fixed number of rows."""

    ids: Tensor  # [rows]
    step: StaticStep
    repeat: Callable[[], Tensor] | None = None  # runs it again, and returns hidden rows in the same memory


class StepGraphs:
    """Runs a model's passes of up to a draft's verification, with a recording for each of a few numbers of rows.

    The first recording that fails is the last: from then on, passes run one operation at a time. What a failed one has
    stored lies where the pass under way stores its own, or behind that.

    Args:
        cache: an empty cache.
        record: returns a callable that repeats a computation in the same memory; None for CUDA graphs.
    """

    def __init__(self, model: Model, cache: StaticCache, record: Record | None = None) -> None:
        self._model, self._cache = model, cache
        self._record = record or CudaRecorder(model.device)
        self._recordings: dict[Hashable, _Recording] = {}
        self._failed = False
        cache.clear()

    def serves(self, tokens: int, tree: Tree | None = None) -> bool:
        """Return whether a pass of so many tokens is recorded; those of a tree are not."""
        return tree is None and not self._failed and tokens <= LONGEST_GAMMA + 1 and self._cache.fits(padded(tokens))

    @torch.inference_mode()
    def prepare(self, tokens: int) -> None:
        """Record passes of up to `tokens` tokens ahead, so that the first steps' times are like the others'.

        Overwrites what the cache keeps of the newest pass, such as its queries.
        """
        for rows in (1 << power for power in range(padded(tokens).bit_length())):
            if self.serves(min(rows, tokens)):
                recording = self._recording(rows)
                if recording.repeat is None:
                    recording.step.load_ahead()
                    self._try(recording)

    @torch.inference_mode()
    def forward(self, ids: Tensor) -> Tensor:
        """Run `Model.forward` over the cache."""
        cache, tokens = self._cache, len(ids)
        rows = padded(tokens)
        cache.begin_padded(tokens, rows)
        recording = self._recording(rows)
        recording.step.load()
        repeat = recording.repeat or self._try(recording)
        if repeat is None:
            return self._model.forward(ids, cache)  # the pass starts over
        recording.ids[:tokens] = ids
        hidden = repeat()[:tokens].clone()  # the next replay writes to the same memory
        cache.commit()
        return hidden

    def _recording(self, rows: int) -> _Recording:
        key = rows, self._cache.step_key()
        if key not in self._recordings:
            ids = torch.zeros(rows, dtype=torch.long, device=self._model.device)
            self._recordings[key] = _Recording(ids, self._cache.new_step(rows))
        return self._recordings[key]

    def _try(self, recording: _Recording) -> Callable[[], Tensor] | None:
        """Record a pass, which the cache has begun; return what repeats it, None if it cannot be recorded."""

        def run() -> Tensor:
            return self._model.through(recording.ids, recording.step)

        try:
            recording.repeat = self._record(run)
        except Exception as error:  # of CUDA, of the allocator, of a compiler
            self._failed = True
            self._recordings.clear()
            warnings.warn(f"steps cannot be recorded, and will be slower: {error}", Degraded, stacklevel=2)
        return recording.repeat


def graphs_for(model: Model, cache: KVCache) -> StepGraphs | None:
    """Return the graphs of a model's passes over a cache, or None if a tensor of theirs may move."""
    # With several ranks there are no graphs: not every backend can record the collectives.
    # Nor are there with experts, whose tokens decide which ones a pass runs, with windows, capped scores, sinks or
    # linear attention, or where the inputs of layers follow from positions.
    shape = model.shape
    has_limits = shape.caps_scores or shape.has_sinks or not shape.takes_rows_alone
    has_kinds = shape.sliding_layers or shape.linear_layers
    is_fixed = model.keeps_weights and shape.experts is None and not (has_kinds or has_limits)
    on_gpu = model.device.type == "cuda" and is_fixed and model.group.size == 1
    return StepGraphs(model, cast("StaticCache", cache)) if on_gpu and cache.has_static_steps else None
