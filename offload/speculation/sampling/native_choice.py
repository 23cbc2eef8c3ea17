"""Tokens and distributions of logits on the CPU, by one call of the kernel a row: penalties, `warp` and the choice."""

import ctypes
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...kernels.native import Kernel
from ...kernels.native.checks import check
from ...kernels.native.structs import COUPLED, DISTRIBUTION, DRAWN, GREEDY, NO_TOKEN, Choice
from ...settings.config import Sampling
from .noise import Noise
from .penalties import Penalties

_CHANCES = 32  # random numbers that are computed at once: between two passes, to ask torch takes longer than a choice


class NativeChoice:
    """The kernel's choices for one sequence. Each row has tokens `before` it, behind those that penalties observed."""

    def __init__(
        self,
        kernel: Kernel,
        sampling: Sampling,
        vocab: int,
        penalties: Penalties | None = None,
        noise: Noise | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """Without `noise`, what is not greedy is drawn with the `generator`."""
        self._kernel, self._vocab = kernel, vocab
        self._penalties = penalties if penalties is not None and penalties.active else None
        self._kind = GREEDY if sampling.greedy else DRAWN if noise is None else COUPLED
        numbers = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        self._call = Choice(vocab=vocab, seed=0 if noise is None else noise.seed, **numbers)
        if self._penalties is not None:
            self._call.penalties = ctypes.pointer(self._penalties.terms)
        self._chances = _chances(generator)
        self._coupled = None if noise is None else (noise, torch.empty((1, vocab), dtype=torch.float32))
        self._logits: Tensor | None = None  # the last ones: those of recorded passes lie in the same memory
        self._address = 0

    def serves(self, logits: Tensor) -> bool:
        """Return whether logits `[rows, columns]` have a column for each token of the vocabulary."""
        return logits is self._logits or logits.shape[1] == self._vocab

    def tokens(self, logits: Tensor, positions: Sequence[int], before: Sequence[Sequence[int]]) -> list[int]:
        """Return the token of each row for its position, a negative number where logits are no numbers."""
        call, coupled, found = self._call, self._coupled, []
        call.kind, call.probs = self._kind, None if coupled is None else coupled[1].data_ptr()
        for row, position in enumerate(positions):
            call.position = position
            if self._kind == DRAWN:
                call.chance = next(self._chances)
            token = self._choose(logits, row, before)
            if token == NO_TOKEN and coupled is not None:  # two scores are so close that only their exact bits decide
                token = int(coupled[0].scores(coupled[1], [position]).argmax())
            found.append(token)
        return found

    def distribution(self, logits: Tensor, before: Sequence[Sequence[int]]) -> Tensor:
        """Return the distributions `[rows, vocab]`, as `warp` does."""
        logits = logits.contiguous()  # rows may be the same memory
        probs = torch.empty_like(logits)
        self._call.kind = GREEDY if self._kind == GREEDY else DISTRIBUTION
        for row in range(len(logits)):
            self._call.probs = probs.data_ptr() + row * 4 * self._vocab
            self._choose(logits, row, before)
        return probs

    def _choose(self, logits: Tensor, row: int, before: Sequence[Sequence[int]]) -> int:
        if logits is not self._logits:
            check("logits", logits, (len(logits), self._vocab), torch.float32)
            self._logits, self._address = logits, logits.data_ptr()
        self._call.logits = self._address + row * 4 * self._vocab
        if self._penalties is not None:
            self._penalties.follow(before[row])
        return self._kernel.choose(self._call)


def _chances(generator: torch.Generator | None) -> Iterator[float]:
    """Yield random numbers in [0, 1), which `torch.rand` would return one by one."""
    while True:
        yield from torch.rand(_CHANCES, generator=generator, dtype=torch.float64).tolist()
