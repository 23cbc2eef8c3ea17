"""The texts that a head is trained on: excerpts of given texts, and what the target itself writes after such excerpts.

A head is judged on text that its target writes, so most of it should be of that kind.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

from ..batching.request import BatchRequest
from ..engine import Engine
from ..events import Tokens
from ..settings.config import GenerationConfig, Sampling, Speculation
from ..settings.methods import PLAIN

TEMPERATURES = (1.0, 0.7, 1.0, 0.0)  # of the texts that the target writes, in turn
SPAN = 8  # blocks of an excerpt, so that the target's rows are also those of longer contexts
_SHORTEST = 32  # tokens of an excerpt that the target continues


@dataclass(frozen=True)
class Texts:
    """Token ids of the given texts, and how texts to train on are made of them.

    Attributes:
        given: the ids of each text; none if the target writes everything from `start` on.
        start: the ids that a text begins with where no excerpt does.
        written: the share of blocks that the target writes.
        length: tokens of a block.
        parallel: blocks that are written together.
    """

    given: Sequence[Sequence[int]]
    start: Sequence[int]
    written: float
    length: int
    parallel: int = 16

    @property
    def digest(self) -> str:
        """Return what tells these texts from others."""
        return hashlib.sha256(repr((self.given, self.start)).encode()).hexdigest()[:16]

    def make(self, engine: Engine, blocks: int, seed: str) -> list[list[int]]:
        """Return texts of whole blocks, `blocks` in all; those of one `seed` are always the same."""
        choose = random.Random(seed)
        written = blocks if not self.given else round(self.written * blocks)
        prompts = [self._prompt(choose) for _ in range(written)]
        found = write(engine, prompts, self.length, choose.getrandbits(31), self.parallel)
        spans = [min(SPAN, blocks - at) for at in range(written, blocks, SPAN)]
        return found + [text for span in spans for text in self._whole_blocks(choose, span)]

    def _prompt(self, choose: random.Random) -> list[int]:
        if not self.given:
            return list(self.start)
        return self._excerpt(choose, choose.randint(min(_SHORTEST, self.length // 2), self.length // 2))

    def _whole_blocks(self, choose: random.Random, span: int) -> list[list[int]]:
        """Return an excerpt of `span` blocks; of shorter texts several, of as many blocks in all."""
        found = self._excerpt(choose, span * self.length)
        kept = len(found) // self.length
        if kept == span:
            return [found]
        more = self._whole_blocks(choose, span - max(kept, 1))
        return [found[: kept * self.length], *more] if kept else more

    def _excerpt(self, choose: random.Random, length: int) -> list[int]:
        """Return up to `length` tokens from a random place; every place of all texts is equally likely."""
        places = [max(len(text) - length, 0) + 1 for text in self.given]
        index = choose.choices(range(len(places)), places)[0]
        at = choose.randrange(places[index])
        return list(self.given[index][at : at + length])


def write(engine: Engine, prompts: Sequence[list[int]], length: int, seed: int, parallel: int) -> list[list[int]]:
    """Return the prompts, each continued by the target to `length` tokens, at the temperatures in turn."""
    engine, found = engine.without_end(), [list(prompt) for prompt in prompts]
    requests = (
        BatchRequest(
            index,
            prompt,
            Sampling(temperature=TEMPERATURES[index % len(TEMPERATURES)], top_p=1.0, coupled=True),
            GenerationConfig(length - len(prompt), (seed + index) % 2**31),
            Speculation(PLAIN),
        )
        for index, prompt in enumerate(prompts)
    )
    for index, event in engine.generate_batch(requests, parallel):
        if isinstance(event, Tokens) and isinstance(index, int):
            found[index] += event.ids
    return found
