"""The settings of the training of a head. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass

from .validation import require, require_between, require_tokens, require_types


@dataclass(frozen=True)
class Distillation:
    """The settings of a training. Raises SettingsError.

    Attributes:
        tokens: of the texts to train on.
        length: tokens of a block, which the head sees together.
        written: the share of blocks that the target writes.
        vocab: tokens that the head can propose.
        window: slots that the head attends to.
        depth: of its own steps that it is trained for.
        steps: of the optimisation.
        batch: blocks in each step.
        rate: the highest learning rate.
        seed: of texts, first weights and the order of blocks.
    """

    tokens: int = 1_000_000
    length: int = 512
    written: float = 0.75
    vocab: int = 8192
    window: int = 512
    depth: int = 3
    steps: int = 4000
    batch: int = 2
    rate: float = 1.5e-3
    seed: int = 0

    def __post_init__(self) -> None:
        require_types(self)
        require_tokens("tokens", self.tokens, 1, "use a number such as 1M")
        require_tokens("length", self.length, 16, "use 16 tokens or more, such as 512")
        require_between("written", self.written, 0, 1, "use a share from 0 to 1, such as 0.75")
        require_tokens("draft-vocab", self.vocab, 16, "use a number of tokens, such as 8192")
        require_tokens("window", self.window, 16, "use a number of tokens, such as 512")
        require_between("depth", self.depth, 1, 8, "use 1 to 8 drafted tokens, such as 3")
        require_between("steps", self.steps, 1, 10**9, "use a positive number, such as 4000")
        require_between("batch", self.batch, 1, 4096, "use a positive number of blocks, such as 2")
        require(0 < self.rate <= 0.1, f"rate is {self.rate}", "use a number above 0 and up to 0.1, such as 1.5e-3")
        require_between("seed", self.seed, 0, 2**31 - 1, "use a whole number below 2^31")
