"""Random noise that depends on seed, position and token alone, and the token that it picks from a distribution.

Philox4x32-10 is counter-based (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011): any number can be
computed by itself. It is computed with integers, and the logarithm with exactly rounded operations, one at a time, so
every device and any grouping of the work gives the same bits.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_LN2 = 0.6931471805599453
_BLOCK = 16  # positions whose noise is computed together where the whole vocabulary's is needed
_BLOCKS = 4  # that are kept: a draft and its verification ask for the same ones


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: int) -> tuple[Tensor, ...]:
    """Return the 4 words of Philox4x32-10 for a counter of 4 words; the seed's halves are its key.

    Words are int64 of 0 to 2^32 - 1, any shapes that broadcast.
    """
    c0, c1, c2, c3 = counter
    key0, key1 = seed & _WORD, seed >> 32
    for _ in range(10):
        # Products of 64 bits wrap into the sign bit, and `>>` extends it: the masks undo that.
        first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = (second >> 32 & _WORD) ^ c1 ^ key0, second & _WORD
        c2, c3 = (first >> 32 & _WORD) ^ c3 ^ key1, first & _WORD
        key0, key1 = (key0 + 0x9E3779B9) & _WORD, (key1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def exponential(words: Tensor) -> Tensor:
    """Return exponentially distributed numbers in fp32 for words of 0 to 2^32 - 1: -log(1 - (word + 1/2) / 2^32).

    Relative error below 1e-7. The logarithm is a series in fp64, since `torch.log` differs between devices.
    """
    mantissa, exponent = torch.frexp((2**33 - 1 - 2 * words).double())  # exact: integers of 33 bits
    is_low = mantissa < 0.5**0.5
    mantissa = mantissa + mantissa * is_low  # sqrt(1/2) to sqrt(2)
    exponent = exponent - 33 - is_low.to(exponent.dtype)
    s = (mantissa - 1) / (mantissa + 1)  # log(m) = 2 (s + s^3 / 3 + s^5 / 5 + ...), |s| < 0.172
    z = s * s
    series = z * (1 / 13) + 1 / 11
    for divisor in (9, 7, 5, 3):
        series = series * z + 1 / divisor
    logarithm = exponent.double() * _LN2 + (series * z * s + s) * 2
    return logarithm.neg_().float()


def largest(rows: Tensor) -> Tensor:
    """Return the index of the largest number of each row, `[rows, 1]`; of equal ones the first."""
    if rows.device.type != "cpu":
        return rows.argmax(dim=-1, keepdim=True)
    return torch.from_numpy(rows.numpy().argmax(axis=-1, keepdims=True))  # nine times as fast as torch's


def possible_tokens(probs: np.ndarray) -> np.ndarray | None:
    """Return the indices of the probabilities above 0, if they are few, as after top-p; else None."""
    is_possible = probs > 0  # with flatnonzero ten times as fast as torch
    is_few = 0 < np.count_nonzero(is_possible) < len(probs) / 8
    return np.flatnonzero(is_possible) if is_few else None


class Noise:
    """The noise of one seed: an exponential number for every position of a sequence and every token.

    -log of it is Gumbel noise, so the token with the largest p / exponential is the argmax of log p + Gumbel noise: a
    sample of p. Samples of two distributions with the same noise are equal with a probability of at least
    (1 - d) / (1 + d) for total variation d (Daliri et al., Coupling without Communication and Drafter-Invariant
    Speculative Decoding, arXiv 2408.07978).
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._blocks: dict[tuple[int, int, torch.device], Tensor] = {}  # least recently used first

    def of_tokens(self, positions: Tensor, tokens: Tensor) -> Tensor:
        """Return the exponential numbers `[n]` of n positions and tokens, int64 on one device."""
        zero = torch.zeros_like(positions)
        words = torch.stack(philox((tokens >> 2, positions, zero, zero), self.seed))
        return exponential(words.gather(0, (tokens & 3).unsqueeze(0))[0])

    def rows(self, positions: Sequence[int], vocab: int, device: torch.device) -> Tensor:
        """Return the exponential numbers of all tokens, `[positions, vocab]`."""
        return torch.stack([self._block(at // _BLOCK, vocab, device)[at % _BLOCK] for at in positions])

    def _block(self, index: int, vocab: int, device: torch.device) -> Tensor:
        key = index, vocab, device
        block = self._blocks.pop(key, None)
        if block is None:
            tokens = torch.arange(-(-vocab // 4), device=device)
            positions = torch.arange(index * _BLOCK, (index + 1) * _BLOCK, device=device).unsqueeze(1)
            zero = torch.zeros_like(positions)
            words = torch.stack(philox((tokens, positions, zero, zero), self.seed), dim=-1)
            block = exponential(words.flatten(1)[:, :vocab])
            while len(self._blocks) >= _BLOCKS:
                del self._blocks[next(iter(self._blocks))]
        self._blocks[key] = block
        return block

    def scores(self, probs: Tensor, positions: Sequence[int]) -> Tensor:
        """Return p / exponential of distributions `[rows, vocab]`, each for its position; of 0 it is 0.

        The largest is the sample. The k largest, where they are not 0, are a sample of k tokens without replacement
        (Gumbel top-k: Kool et al., arXiv 1903.06059).
        """
        places = possible_tokens(probs.numpy().ravel()) if probs.device.type == "cpu" else None
        if places is None:
            return probs / self.rows(positions, probs.shape[1], probs.device)
        rows, tokens = map(torch.from_numpy, np.divmod(places, probs.shape[1]))
        scores = torch.zeros_like(probs)
        scores[rows, tokens] = probs[rows, tokens] / self.of_tokens(torch.tensor(positions)[rows], tokens)
        return scores

    def pick(self, probs: Tensor, positions: Sequence[int]) -> Tensor:
        """Return the sample of each distribution `[rows, vocab]` by the noise of its position, `[rows]`, on the device.

        It never has a probability of 0. For a row of NaN it is any token.
        """
        assert len(positions) == len(probs), "a position for each row"
        return largest(self.scores(probs, positions)).squeeze(-1)

    def best(self, probs: Tensor, positions: Sequence[int], count: int) -> Tensor:
        """Return the tokens with the largest scores, `[rows, count]`, the best first; arguments as of `pick`.

        Tokens of a probability above 0 are a sample without replacement; where there are too few, any others follow.
        """
        return self.scores(probs, positions).topk(count, dim=-1).indices
