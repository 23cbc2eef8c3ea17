"""The sessions of one model's requests: the last one is kept, so that the next request does not run a shared prefix."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy

from ..errors import UsageError
from ..memory.factory import TieredStoreFactory
from ..memory.store import Store
from ..model.decoder import Model
from ..model.heads import Head
from ..prompt_cache.prompt import PromptCache
from ..settings.config import Speculation
from .session import Session


class SessionPool:
    """Gives each request a session: the idle one if that serves it, else a new one.

    Attributes:
        prompts: the prompt cache on disk, or None.
        idle: the session of the last request, while no request uses it.
        reserved: the least capacity of new sessions, in tokens. See `Engine.reserve`.
    """

    def __init__(
        self,
        model: Model,
        draft: Model | Head | None,
        prefill_chunk: int,
        stores: TieredStoreFactory | None,
        prompts: PromptCache | None,
    ) -> None:
        self.prompts = prompts
        self.idle: Session | None = None
        self.reserved = 0
        self._model, self._draft = model, draft
        self._prefill_chunk, self._stores = prefill_chunk, stores

    @contextmanager
    def session(self, capacity: int, spare: int = 0, settings: Speculation | None = None) -> Iterator[Session]:
        """Lend a session, and keep it for the next request, also if this one is closed or interrupted, or was wrong.

        A session in which anything else has failed may be half changed: it is dropped.
        """
        session, keeps = self._take(capacity, spare, settings or Speculation()), True
        try:
            yield session
        except Exception as error:
            keeps = isinstance(error, UsageError)
            raise
        finally:
            if keeps:
                self.idle = session

    def _take(self, capacity: int, spare: int, settings: Speculation) -> Session:
        """Return the idle session if it has room and the right cache, else a new one."""
        session, self.idle = self.idle, None
        if session is not None and session.serves(capacity, spare, settings):
            return session
        del session  # free its memory before the new one is allocated
        if not self._model.shape.rope_depends_on_length:
            capacity = max(capacity, self.reserved)
        return self.new(capacity, spare, settings)

    def new(self, capacity: int, spare: int, settings: Speculation, store: Store | None = None) -> Session:
        """Return a session that is not kept, with its full cache in `store` if that is given. See `Session`."""
        more = (self._stores, self.prompts, spare, settings, store)
        return Session(self._model, self._draft, capacity, self._prefill_chunk, *more)

    def emptied(self) -> SessionPool:
        """Return a pool for the same models, with no session and nothing reserved."""
        pool = copy(self)
        pool.idle, pool.reserved = None, 0
        return pool
