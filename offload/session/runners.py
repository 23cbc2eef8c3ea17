"""The runners of a session's models and caches, kept from one request to the next while these ask for the same."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from ..caches.factory import draft_cache, selected_cache
from ..caches.full import FullCache
from ..model.decoder import Model
from ..model.heads import Head
from ..settings.config import Speculation
from ..settings.method_sizes import draft_chunk, has_draft_model, has_middle, middle_kind, sized, tail_tokens
from ..speculation.drafters.ngram import LookupDrafter
from ..speculation.levels.hierarchy import Runners
from ..speculation.passes.draft_runner import DraftRunner
from ..speculation.passes.head_runner import HeadRunner
from ..speculation.passes.runner import Runner
from ..speculation.passes.selected_runner import SelectedRunner

MIDDLE, DRAFT = "middle", "draft"


class SessionRunners:
    """Chooses the runners of each request over one full cache, and keeps the latest for each use.

    Attributes:
        lookup: the n-gram drafter.
    """

    def __init__(self, target: Runner[FullCache], draft: Model | Head | None) -> None:
        self._target, self._draft = target, draft
        self.lookup = LookupDrafter()
        self._kept: dict[str, tuple[Hashable, Any]] = {}  # by use, with the settings that each was made for

    def choose(self, settings: Speculation, tokens: int) -> Runners:
        """Return the runners for a request of up to `tokens` tokens."""
        middle, settings = None, sized(settings, tokens)
        kind = middle_kind(settings)
        if kind is not None and has_middle(settings, tokens):
            middle = self._selected(kind, settings)
        draft = self._draft_runner(settings, middle) if has_draft_model(settings) else None
        self._target.keep_rows(draft.reach if isinstance(draft, HeadRunner) else 0)
        return Runners(self._target, middle, draft, self.lookup)

    def _keep(self, use: str, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the last runner for this use if its settings are those of `key`, else a new one."""
        if use not in self._kept or self._kept[use][0] != key:
            self._kept.pop(use, None)  # free its memory first
            self._kept[use] = key, make()
        return self._kept[use][1]

    def _selected(self, kind: str, settings: Speculation) -> SelectedRunner:
        """Return the runner of a middle level."""
        sizes = settings.sink, settings.budget, settings.chunk, settings.rebuild_every, tail_tokens(settings)
        key, target = (kind, sizes), self._target
        runner = self._keep(MIDDLE, key, lambda: SelectedRunner(target, selected_cache(target.cache, settings, kind)))
        runner.renew()
        return runner

    def _draft_runner(self, settings: Speculation, middle: SelectedRunner | None) -> DraftRunner | HeadRunner:
        """Return the runner of the draft model, or of a head, which reads the rows that the `middle` leaves, too."""
        key = settings.sink, settings.window, draft_chunk(settings)
        runner = self._keep(DRAFT, key, lambda: self._new_draft_runner(settings))
        if isinstance(runner, HeadRunner):
            runner.use([self._target, *([] if middle is None else [middle])])
            if middle is not None:
                middle.keep_rows(1)
        return runner

    def _new_draft_runner(self, settings: Speculation) -> DraftRunner | HeadRunner:
        if isinstance(self._draft, Head):
            return HeadRunner(self._draft, settings, [self._target])
        assert self._draft is not None, "requests with a draft model are refused where there is none"
        return DraftRunner(self._draft, draft_cache(self._draft, settings), draft_chunk(settings))
