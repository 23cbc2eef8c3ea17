"""The sessions of a batch: one for each sequence, in pages where prompts that begin alike share their beginning."""

from collections.abc import Iterator
from contextlib import contextmanager

from ..model.decoder import Model
from ..model.heads import Head
from ..session.pool import SessionPool
from ..session.session import Session
from ..settings.method_sizes import has_draft_model, tree_nodes
from ..speculation.passes.head_runner import rows_needed
from .lane import Lane
from .memory import BatchMemory
from .request import BatchRequest


class BatchSessions:
    """Gives each sequence of a batch a session of its own; without a `memory` for all, each has its own caches."""

    def __init__(self, pool: SessionPool, memory: BatchMemory | None, draft: Model | Head | None) -> None:
        self._pool, self._memory, self._draft = pool, memory, draft

    @contextmanager
    def session(self, request: BatchRequest, ids: list[int], lane: Lane) -> Iterator[Session]:
        """Lend a session for the token `ids` of a request; its sequence waits for room, as its `lane` lets it."""
        settings, draft = request.speculation, self._draft
        length, spare = len(ids) + request.config.max_new_tokens, tree_nodes(settings)
        if self._memory is None or settings.approximate is not None:
            yield self._pool.new(length, spare, settings)
            return
        fresh = rows_needed(draft, settings) if has_draft_model(settings) and isinstance(draft, Head) else 1
        allocation, shared = self._memory.allocate(ids, length, spare, lane, fresh)
        try:
            session = self._pool.new(length, spare, settings, allocation.store)
            allocation.runner = session.full
            session.full.adopt(ids[:shared])
            yield session
        except Exception:
            allocation.runner = None  # what it has written is not to be shared
            raise
        finally:
            self._memory.free(allocation)
