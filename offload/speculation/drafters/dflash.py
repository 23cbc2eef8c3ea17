"""Drafts with DFlash: a block of tokens in one pass, over slots that rows of the target gave."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ...architecture.dflash_shape import DFlashShape
from ...memory.host_memory import upload
from ...model.dflash import DFlash, DraftBlockCache
from ...sequence import TokenSequence
from ..trees.tree import Draft, DraftedTree
from .draft_passes import ParallelPasses
from .heads import HeadDrafter, HeadRunner


class DFlashRunner(HeadRunner):
    """A DFlash drafter with a cache of its latest slots. Slot t has what the target computed for the token there."""

    model: DFlash
    cache: DraftBlockCache
    cache_class = DraftBlockCache

    def rows(self, sequence: TokenSequence, draft: Sequence[int] = ()) -> Tensor:
        return self.slots(sequence, 1)

    @torch.inference_mode()
    def slots(self, sequence: TokenSequence, depth: int) -> Tensor:
        """Return hidden rows `[depth, hidden]` for the next tokens, of mask tokens behind the last one."""
        end, self._last = len(sequence) - 1, self._rows  # a slot's own row is of no use, so none is run for it
        self._follow(sequence, end)
        while (start := self.cache.length) < end:
            self.model.note(self._features(sequence, start, min(self._most, end - start)), self.cache)
        self._true = max(self._true, min(end, self.sources[0].rows_kept(sequence).stop))
        places_ahead = self.model.own.markov > 0  # whether a token's row is that of the next one
        ids = torch.tensor([sequence.tokens[-1], *[self.model.own.mask_token] * (depth - places_ahead)])
        return self.model.block(upload(ids, self.model.device), self.cache)[-depth:]


class BlockPasses(ParallelPasses):
    """One pass for the rows of all tokens; of DSpark, the logits depend on the token before, too."""

    _runner: Any

    def first(self, sequence: TokenSequence, depth: int) -> Tensor:
        model: DFlash = self._runner.model
        ids = upload(torch.tensor(sequence.tokens[-1:]), model.device)
        return model.biased(super().first(sequence, depth), ids)

    def following(self, ids: Tensor) -> Tensor:
        return self._runner.model.biased(super().following(ids), ids)

    def following_nodes(self, ids: Tensor, parents: Sequence[int]) -> Tensor:
        return self._runner.model.biased(super().following_nodes(ids, parents), ids)


class DFlashDrafter(HeadDrafter):
    """A DFlash drafter: drafts are no longer than its blocks."""

    in_one_pass = True
    passes = BlockPasses

    def propose(self, sequence: TokenSequence, limit: int, tree: DraftedTree | None = None) -> Draft:
        own = cast("DFlashShape", self._head.model.own)
        return super().propose(sequence, min(limit, own.longest), tree)
