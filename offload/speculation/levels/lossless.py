"""Compare the output of speculation with plain decoding of the same prompt: greedy, or by coupled sampling."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...sequence import TokenSequence
from ..passes.runner import Runner
from ..sampling.warp import Sampler
from .coupled_choice import CoupledChoice

_BLOCK = 8  # rows of the pass that rounding noise is measured with; a verification has as many


@dataclass(frozen=True, slots=True)
class Divergence:
    """A token that plain decoding would not have chosen.

    `position` counts emitted tokens from 0. `margin` is plain decoding's logit of the expected token minus that of the
    emitted one; with coupled sampling, how much a logit would have to differ for the emitted one. `noise` is the
    difference of the logits when the same rows are computed in another grouping.
    """

    position: int
    emitted: int
    expected: int
    margin: float
    noise: float

    @property
    def is_tie(self) -> bool:
        """Return whether rounding alone can explain the divergence: each logit may be off by the noise."""
        return self.margin <= 2 * self.noise


@dataclass(frozen=True, slots=True)
class Replay:
    """Every position at which plain decoding, given the tokens before, chooses another token."""

    tokens: int
    divergences: tuple[Divergence, ...]

    @property
    def equal(self) -> bool:
        """Return whether the outputs are the same, token for token."""
        return not self.divergences

    @property
    def lossless(self) -> bool:
        """Return whether the outputs are the same but for floating-point ties."""
        return all(divergence.is_tie for divergence in self.divergences)


def replay(
    runner: Runner, prompt: Sequence[int], emitted: Sequence[int], sampler: Sampler, generated: int = 0
) -> Replay:
    """Run plain decoding after `prompt` along the emitted tokens, with the sampler's penalties; compare.

    Decoding is greedy, unless the sampler is coupled. The last `generated` tokens of the prompt count as generated
    ones. The sampler must be a new one. Without a divergence, plain decoding emits the same tokens. After a divergence
    the comparison continues along the emitted tokens, so that a fault after a tie is found as well.
    """
    sequence = TokenSequence(prompt)
    sampler.observe_prompt(prompt[: len(prompt) - generated])
    sampler.observe(prompt[len(prompt) - generated :])
    divergences: list[Divergence] = []
    for position, token in enumerate(emitted):
        plain = runner.model.logits(runner.rows(sequence))
        logits = sampler.penalised(plain)[0]
        coupled = None if sampler.noise is None else CoupledChoice(sampler.sampling, sampler.noise, len(sequence))
        expected = int(logits.argmax()) if coupled is None else coupled.pick(logits)
        if expected != token:
            margin = coupled.margin(logits, expected, token) if coupled else float(logits[expected] - logits[token])
            noise = _noise(runner, sequence, emitted[position:], plain[0])
            divergences.append(Divergence(position, token, expected, margin, noise))
        sequence.extend([token])
        sampler.observe([token])
    return Replay(len(emitted), tuple(divergences))


def _noise(runner: Runner, sequence: TokenSequence, following: Sequence[int], plain: torch.Tensor) -> float:
    """Return how much logits change when the last tokens and those that follow are one pass, as in a verification."""
    behind = min(_BLOCK // 2, len(sequence) - 1)
    ahead = min(_BLOCK - behind, len(following))
    earlier = TokenSequence(sequence.tokens[: len(sequence) - behind])
    block = [*sequence.tokens[len(earlier) :], *following[:ahead]]
    logits = runner.model.logits(runner.rows(earlier, block))[behind]
    rounding = torch.finfo(runner.model.dtype).eps * float(plain.abs().max())
    return max(float((logits - plain).abs().max()), rounding)
