"""The layers with linear attention: the states of one sequence, and earlier ones to roll back to."""

from __future__ import annotations

import torch
from torch import Tensor

from ..architecture.dims import LinearAttention
from ..architecture.layer_spec import STATE_ROOM
from ..kernels.delta_rule import DeltaRule, run_delta_rule
from ..kernels.native import Kernel

_BEHIND = 32  # tokens before those of a pass that a new span begins with: a rollback may be longer than the last draft


class Span:
    """The states at position `start`, and the inputs of up to STATE_ROOM tokens behind, up to position `end`."""

    def __init__(self, sizes: LinearAttention, dtype: torch.dtype, device: torch.device) -> None:
        self.start = self.end = 0
        layers, before = sizes.layers, sizes.kernel - 1
        states = (layers, sizes.value_heads, sizes.key_dim, sizes.value_dim)
        self.recurrent = torch.zeros(states, dtype=torch.float32, device=device)
        # The inputs of the convolution, those of the tokens before `start` first.
        self.rows = torch.zeros((layers, before + STATE_ROOM, sizes.width), dtype=dtype, device=device)
        gates = (layers, STATE_ROOM, 2 * sizes.value_heads)
        self.gates = torch.zeros(gates, dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        """Return the bytes of states and inputs."""
        return self.recurrent.nbytes + self.rows.nbytes + self.gates.nbytes

    def covers(self, position: int) -> bool:
        """Return whether the states at a position can be computed."""
        return self.start <= position <= self.end


class States:
    """The states of a sequence's layers with linear attention. Layers are those, numbered.

    The current states follow the tokens that are run. Beside them there are two spans: the newest one, and the one at
    the end of the prompt. A rollback to a position within one computes the states there again, from its inputs: with
    the native kernel in the same bits. `covers` says whether there is such a span.
    """

    def __init__(
        self, sizes: LinearAttention, dtype: torch.dtype, device: torch.device, kernel: Kernel | None = None
    ) -> None:
        """Make the states of an empty sequence."""
        self._made_of = sizes, dtype, device, kernel
        self._sizes, self._before, self._kernel = sizes, sizes.kernel - 1, kernel
        self._spans = [Span(sizes, dtype, device)]  # in order
        self._free: Span | None = Span(sizes, dtype, device)
        self._recurrent = self._spans[0].recurrent.clone()
        self._inputs = self._spans[0].rows[:, : self._before].clone()  # of the last tokens before the current states
        self._reached = 0  # the position of the current states; -1 while a pass is under way
        self._rules: dict[int, DeltaRule] = {}  # by layer
        self._start = self._end = 0  # of the pass
        self._next = (-1, 0)  # the current layer, and the position of its next token
        self._begun: Span | None = None  # that begins within the pass

    def like(self) -> States:
        """Return empty states for the same model."""
        return States(*self._made_of)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all states and inputs."""
        spans = [*self._spans, *([self._free] if self._free else [])]
        return sum(span.nbytes for span in spans) + self._recurrent.nbytes + self._inputs.nbytes

    def covers(self, position: int) -> bool:
        """Return whether the sequence can go on from a position."""
        return position == 0 or any(span.covers(position) for span in self._spans)

    @torch.inference_mode()
    def begin(self, start: int, tokens: int) -> None:
        """Begin a pass over `tokens` tokens behind the `start` first ones."""
        if self._begun is not None:  # of an interrupted pass
            self._free, self._begun = self._begun, None
        assert self.covers(start), f"a pass behind {start} tokens, whose states are not there"
        self._move_to(start)
        self._start, self._end, self._next = start, start + tokens, (-1, 0)
        if self._end > self._spans[-1].start + STATE_ROOM:
            self._begin_span(max(start - _BEHIND, self._end - STATE_ROOM))
        self._reached = -1

    def _begin_span(self, first: int) -> None:
        """Begin a span at a position; within the pass, where its layers come to it."""
        if first > self._start:
            self._begun = self._free or self._spans.pop(0)  # the prompt ends elsewhere now
            self._free, self._begun.start, self._begun.end = None, first, first
            return
        newest = self._spans[-1]
        first = max(first, newest.start)
        recurrent, _ = self._states_at(first)
        span, old = self._free or newest, newest.start
        if span is newest:
            span.end = -1  # an interrupt must leave nothing that is half of it
        kept = self._start - first
        for new, inputs, head in ((span.rows, newest.rows, self._before), (span.gates, newest.gates, 0)):
            new[:, : head + kept] = inputs[:, first - old : first - old + head + kept].clone()
        span.recurrent.copy_(recurrent)
        span.start, span.end = first, self._start
        if span is not newest:
            self._free = None
            self._spans.append(span)

    def attend(self, layer: int, rule: DeltaRule, rows: Tensor, gates: Tensor) -> Tensor:
        """Run tokens of the pass, or a chunk of it; arguments and result as of `KVCache.attend_linear`."""
        self._rules[layer] = rule
        first = self._next[1] if self._next[0] == layer else self._start
        self._next = layer, first + len(rows)
        cut = self._begun.start - first if self._begun is not None else 0
        if not 0 < cut < len(rows):
            return self._run(layer, rule, first, rows, gates)
        parts = ((first, slice(0, cut)), (first + cut, slice(cut, None)))
        return torch.cat([self._run(layer, rule, at, rows[some], gates[some]) for at, some in parts])

    def _run(self, layer: int, rule: DeltaRule, first: int, rows: Tensor, gates: Tensor) -> Tensor:
        """Run tokens from position `first` on, all before or all within the newest span."""
        span, inputs = self._begun or self._spans[-1], self._inputs[layer]
        if span is self._begun and first == span.start:
            span.recurrent[layer].copy_(self._recurrent[layer])
            span.rows[layer, : self._before] = inputs
        if first >= span.start:
            at = first - span.start
            span.rows[layer, self._before + at : self._before + at + len(rows)] = rows
            span.gates[layer, at : at + len(rows)] = gates
        out = run_delta_rule(rule, inputs, rows, gates, self._recurrent[layer], self._kernel)
        inputs.copy_(torch.cat((inputs, rows))[-self._before :])
        return out

    def commit(self) -> None:
        """End the pass."""
        if self._begun is not None:
            self._free, self._spans, self._begun = self._spans[-1], [self._begun], None
        self._spans[-1].end = self._reached = self._end

    @torch.inference_mode()
    def truncate(self, length: int) -> None:
        """Forget what is behind position `length`, which is covered."""
        if length == 0 and not self._spans[0].covers(0):
            self._start_at(0, torch.zeros_like(self._recurrent), torch.zeros_like(self._inputs))
        if self._spans[-1].start > length:
            self._drop_newest()
        for span in self._spans:
            span.end = min(span.end, length)
        if self._reached > length:
            self._reached = -1

    def _drop_newest(self) -> None:
        """Drop the newest span unless it is the only one."""
        if len(self._spans) > 1:
            self._free = self._spans.pop()

    def _start_at(self, position: int, recurrent: Tensor, inputs: Tensor) -> None:
        """Begin at a position with these states, and forget all others."""
        self._drop_newest()
        self._reached, (span,) = -1, self._spans
        span.end = -1
        span.recurrent.copy_(recurrent)
        span.rows[:, : self._before] = inputs
        span.start = span.end = position
        self._recurrent.copy_(recurrent)
        self._inputs.copy_(inputs)
        self._reached = position

    def _move_to(self, position: int) -> None:
        """Make the states at a position the current ones."""
        if position != self._reached:
            self.truncate(position)
            recurrent, inputs = self._states_at(position)
            self._reached = -1  # an interrupt between two copies must not leave half of them
            self._recurrent.copy_(recurrent)
            self._inputs.copy_(inputs)
            self._reached = position

    def _states_at(self, position: int) -> tuple[Tensor, Tensor]:
        """Return the recurrent states and the inputs before them at a position, computed from a span's inputs."""
        if position == self._reached:
            return self._recurrent, self._inputs
        span = next(span for span in reversed(self._spans) if span.covers(position))
        recurrent, count = span.recurrent.clone(), position - span.start
        for layer in range(self._sizes.layers if count else 0):
            every = span.rows[layer, : self._before + count]
            parts = every[: self._before], every[self._before :], span.gates[layer, :count]
            run_delta_rule(self._rules[layer], *parts, recurrent[layer], self._kernel)
        return recurrent, span.rows[:, count : count + self._before]

    @torch.inference_mode()
    def copy(self, source: States, position: int) -> None:
        """Copy the states at a position that other states of the sequence cover, and forget all others."""
        self._start_at(position, *source._states_at(position))

    @torch.inference_mode()
    def skip(self, length: int, position: int) -> None:
        """Go on at a position with the states behind `length` tokens, which are covered."""
        self._start_at(position, *(x.clone() for x in self._states_at(length)))

    @torch.inference_mode()
    def dump(self, position: int) -> Tensor:
        """Return the states at a position that is covered, in one run of bytes."""
        parts = (x.contiguous().view(torch.uint8).flatten() for x in self._states_at(position))
        return torch.cat(list(parts)).cpu()

    @torch.inference_mode()
    def load(self, position: int, states: Tensor) -> None:
        """Begin at a position with what `dump` returned."""
        size = self._recurrent.nbytes
        assert len(states) == size + self._inputs.nbytes, "states of another model"
        states = states.to(self._recurrent.device, copy=True)
        recurrent, inputs = states[:size].view(torch.float32), states[size:].view(self._inputs.dtype)
        self._start_at(position, recurrent.view_as(self._recurrent), inputs.view_as(self._inputs))
