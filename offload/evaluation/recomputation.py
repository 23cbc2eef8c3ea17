"""The sliding window with recomputation, to which StreamingLLM compares itself (arXiv 2309.17453, section 3.1).

Every token is predicted from the latest tokens alone, which are run anew for it as a text of their own: no key or value
comes from a token outside of the window. So it needs no sink, and each token costs as much as reading the window.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from torch import Tensor

from ..events import Prefilled
from ..model.decoder import Model
from ..sequence import TokenSequence
from ..speculation.passes.runner import Runner
from .teacher_forcing import Predictor


class Recomputed:
    """Predicts each token from the `window` tokens before it, which a runner runs anew.

    Of the runner's cache, only what equals the window's own beginning is used again. It needs room for the window.
    """

    def __init__(self, runner: Runner, window: int) -> None:
        assert window > 0, f"a window of {window} tokens"
        self._runner, self._window = runner, window

    @property
    def model(self) -> Model:
        return self._runner.model

    def prefill(self, sequence: TokenSequence) -> Generator[Prefilled]:
        """Read nothing ahead: each token reads its window. Yields that the sequence is read."""
        yield Prefilled(len(sequence), len(sequence))

    def rows(self, sequence: TokenSequence) -> Tensor:
        """Return the hidden row `[1, hidden]` of the sequence's last token, in its window."""
        return self._runner.rows(TokenSequence(sequence.tokens[-self._window :]))


def continue_greedily(
    predictor: Predictor, ids: Sequence[int], count: int
) -> Generator[Prefilled, None, tuple[int, ...]]:
    """Read a text `ids` and return the `count` tokens that are likeliest after it, one after the other.

    Yields the progress of reading.
    """
    sequence, found = TokenSequence(ids), []
    yield from predictor.prefill(sequence)
    for _ in range(count):
        found.append(int(predictor.model.logits(predictor.rows(sequence))[0].argmax()))
        sequence.extend(found[-1:])
    return tuple(found)
