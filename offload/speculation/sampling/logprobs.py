"""Log-probabilities of emitted tokens, from the logits that verified them: no further pass is run for them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...events import Logprobs


@torch.inference_mode()
def token_logprobs(logits: Tensor, tokens: Sequence[int], count: int) -> tuple[Logprobs, ...]:
    """Return the log-probabilities of tokens, and of the `count` likeliest ones at their positions.

    Args:
        logits: `[tokens, vocab]` in fp32, of the model: before penalties and temperature.
    """
    logprobs = logits.log_softmax(dim=-1)
    own = logprobs.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1)).squeeze(1)
    best = logprobs.topk(min(count, logits.shape[-1]), dim=-1)
    rows = zip(own.tolist(), best.indices.tolist(), best.values.tolist(), strict=True)
    return tuple(Logprobs(each, tuple(zip(ids, values, strict=True))) for each, ids, values in rows)


class LogprobsRecorder:
    """Keeps the log-probabilities of the tokens that the last verification has emitted."""

    def __init__(self, count: int) -> None:
        """`count`: how many of the likeliest tokens each has beside its own."""
        self._count = count
        self._found: tuple[Logprobs, ...] = ()

    def record(self, logits: Tensor, tokens: Sequence[int]) -> None:
        """Compute those of emitted tokens, from the logits `[tokens, vocab]` that each was chosen from."""
        self._found = token_logprobs(logits, tokens, self._count)

    def first(self, count: int) -> tuple[Logprobs, ...]:
        """Return those of the first `count` tokens; the others were cut off."""
        return self._found[:count]
