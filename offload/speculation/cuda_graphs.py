"""Forward passes of a few rows over a small cache with fixed shapes: recorded once as CUDA graphs, and replayed.

A retrieval step runs a thousand small operations. To launch them one by one takes the host longer than the GPU needs to
run them; a CUDA graph launches them at once. The inputs that change from step to step are tensors: ids, angles, store
positions, and the attention mask.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..architecture.rope import rotate
from ..config import LONGEST_GAMMA
from ..decoder import Model
from ..errors import Degraded
from ..kernels import triton
from ..kernels.triton.accumulate import attend_growing
from ..kv_cache.retrieval import CopiedCache
from ..kv_cache.store import PlainStore

_WARM_UP = 2  # runs before a recording: libraries choose kernels and allocate memory in the first ones


class StepInputs(NamedTuple):
    """The inputs of a step of T rows, always in the same memory."""

    ids: Tensor  # [T]
    cos: Tensor  # [T, 1, head_dim]
    sin: Tensor  # [T, 1, head_dim]
    positions: Tensor  # [T], the store positions of the rows' keys and values
    seen: Tensor  # [1], how many positions the first row sees; each further row sees one more
    visible: Tensor | None  # [T, capacity], bool: the same as a mask, where Triton does not attend


def padded(rows: int) -> int:
    """Return the number of rows that a pass of `rows` is recorded with: the next power of two."""
    return 1 << (rows - 1).bit_length()


class StaticView:
    """The view of a selected cache's store that a recorded step runs on. The caller begins and commits the pass."""

    def __init__(self, store: PlainStore, inputs: StepInputs) -> None:
        self._store, self._inputs = store, inputs

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend as `KVCache.attend`, over as much of the store as `inputs` say."""
        inputs, rows = self._inputs, (self._inputs.cos, self._inputs.sin)
        keys, values = self._store.layer(layer)  # [kv_heads, capacity, head_dim]
        keys.index_copy_(1, inputs.positions, rotate(k, rows).transpose(0, 1))
        values.index_copy_(1, inputs.positions, v.transpose(0, 1))
        if inputs.visible is None:
            return attend_growing(rotate(q, rows), keys, values, inputs.seen)
        return self._masked(q, keys, values)

    def _masked(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        inputs, rows = self._inputs, (self._inputs.cos, self._inputs.sin)
        tokens, heads, head_dim = q.shape
        grouped = rotate(q, rows).view(tokens, len(keys), -1, head_dim).permute(1, 2, 0, 3)  # [kv_heads, group, T, .]
        expanded = (x.unsqueeze(1).expand(-1, grouped.shape[1], -1, -1) for x in (keys, values))
        out = F.scaled_dot_product_attention(grouped, *expanded, attn_mask=inputs.visible)
        return out.permute(2, 0, 1, 3).reshape(tokens, heads, head_dim)


class StepGraphs:
    """Runs a model over a selected cache, with a recording for each of a few numbers of rows.

    A pass of fewer rows is filled up: the rows behind it write to positions that nobody sees yet.

    Args:
        cache: an empty cache.
        record: returns a callable that repeats a computation in the same memory; None for CUDA graphs. After it fails,
            steps run one operation at a time.
    """

    def __init__(
        self,
        model: Model,
        cache: CopiedCache,
        record: Callable[[Callable[[], Tensor]], Callable[[], Tensor]] | None = None,
    ) -> None:
        self._model, self._cache = model, cache
        self._record = record or CudaRecorder(model.device)
        self._steps: dict[int, tuple[StepInputs, Callable[[], Tensor]]] = {}
        self._failed = False
        cache.store.clear()  # masked values are multiplied by zero, so they must not be NaN

    def serves(self, rows: int) -> bool:
        """Return whether a pass of so many rows is recorded: a draft's verification at most."""
        return not self._failed and rows <= LONGEST_GAMMA + 1

    @torch.inference_mode()
    def forward(self, ids: Tensor) -> Tensor:
        """Run `Model.forward` over the cache."""
        cache, rows = self._cache, len(ids)
        cache.begin(rows)
        step = self._steps.get(padded(rows))
        inputs = self._inputs(padded(rows)) if step is None else step[0]
        self._load(inputs, ids)
        if step is None:
            step = self._record_step(inputs)
        hidden = step[1]()[:rows].clone()  # the next replay writes to the same memory
        cache.commit()
        return hidden

    def _inputs(self, rows: int) -> StepInputs:
        model, store = self._model, self._cache.store
        angles = (
            torch.empty((rows, 1, model.shape.head_dim), dtype=model.dtype, device=model.device) for _ in range(2)
        )
        integers = (torch.empty(rows, dtype=torch.long, device=model.device) for _ in range(2))
        ids, positions = integers
        seen = torch.empty(1, dtype=torch.long, device=model.device)
        visible = None
        if not triton.serves(ids.new_empty((rows, 1, model.shape.head_dim), dtype=model.dtype)):
            visible = torch.empty((rows, store.capacity), dtype=torch.bool, device=model.device)
        ids.zero_()
        for angle in (inputs := StepInputs(ids, *angles, positions, seen, visible))[1:3]:
            angle.zero_()
        return inputs

    def _load(self, inputs: StepInputs, ids: Tensor) -> None:
        cache = self._cache
        inputs.ids[: len(ids)] = ids
        for target, angles in zip((inputs.cos, inputs.sin), cache.rows, strict=True):
            target[: len(ids)] = angles
        start = cache.position
        torch.arange(start, start + len(inputs.ids), out=inputs.positions)
        inputs.seen.fill_(start + 1)
        if inputs.visible is not None:
            every = torch.arange(cache.store.capacity, device=ids.device)
            torch.le(every, inputs.positions.unsqueeze(1), out=inputs.visible)

    def _record_step(self, inputs: StepInputs) -> tuple[StepInputs, Callable[[], Tensor]]:
        view = StaticView(self._cache.store, inputs)

        def run() -> Tensor:
            return self._model.through(inputs.ids, view)

        try:
            self._steps[len(inputs.ids)] = inputs, self._record(run)
        except RuntimeError as error:
            self._failed = True
            warnings.warn(f"steps cannot be recorded, and will be slower: {error}", Degraded, stacklevel=2)
            return inputs, run
        return self._steps[len(inputs.ids)]


@contextmanager
def _no_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class CudaRecorder:
    """Records computations as CUDA graphs that share one memory pool: only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: tuple[int, int] | None = None

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Return a callable that replays `run`. Raises RuntimeError for a computation that cannot be recorded."""
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):  # each run stores the same keys at the same positions: the result is unchanged
                run()
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # This thread alone: host attention and loading go on. A garbage collection could free pinned memory, which is
        # not allowed in between.
        with _no_collection(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = run()
        self._pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay
