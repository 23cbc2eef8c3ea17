"""Drafts with an assistant of Gemma 4, over the keys and values of the target."""

from collections.abc import Generator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ...caches.full import FullCache
from ...errors import SettingsError
from ...events import DraftPrefilled
from ...memory.host_memory import upload
from ...model.assistant import Assistant
from ...sequence import TokenSequence
from ..passes.steps import AT_ONCE
from .heads import HeadRunner


class AssistantRunner(HeadRunner):
    """An assistant without a cache: it reads the full one, or where that is not in one memory, a retrieval cache."""

    def __init__(self, head: Assistant) -> None:
        self.model, self.sources, self.executor = head, [], AT_ONCE
        self.reach = 1
        self._rows, self._tree = torch.empty(0), None

    def check(self) -> None:
        """Raise SettingsError if there is no cache that can be read, and so no draft."""
        if not self._can_read:
            raise SettingsError(
                "an assistant reads the target's keys and values for each token that it drafts, and they are offloaded",
                "use --method triforce: it then reads the retrieval cache",
            )

    @property
    def _can_read(self) -> bool:
        return len(self.sources) > 1 or not self._is_offloaded

    def has_rows(self, sequence: TokenSequence) -> bool:
        return self._can_read and super().has_rows(sequence)

    @property
    def _is_offloaded(self) -> bool:
        return cast("FullCache", self.sources[0].cache).store.span > 0

    def read(self, sequence: TokenSequence) -> Generator[DraftPrefilled]:
        yield from ()

    @torch.inference_mode()
    def rows(self, sequence: TokenSequence, draft: Sequence[int] = ()) -> Tensor:
        assert not draft, "an assistant verifies nothing"
        end = len(sequence) - 1
        features = self._features(sequence, end - 1, 1)
        self.cache = lender = self._lender(sequence, end)
        lender.begin_lending()
        ids = upload(torch.tensor(sequence.tokens[-1:]), self.model.device)
        self._tree, self._rows = None, self.model.run(ids, features, lender)
        return self._rows

    def _lender(self, sequence: TokenSequence, end: int) -> Any:
        """Return the first cache that can be read, and has all tokens before `end`."""
        for source in self.sources:
            if source is self.sources[0] and self._is_offloaded:
                continue
            source.settle(sequence)
            if source.cache.length == end:
                return source.cache
        raise AssertionError("the target has run all tokens but the last one")
