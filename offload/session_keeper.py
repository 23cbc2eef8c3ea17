"""The session of the last request, kept for the next one, which may share a prefix with it."""

from collections.abc import Iterator
from contextlib import contextmanager

from .errors import UsageError
from .memory.factory import TieredStoreFactory
from .memory.store import Store
from .model.decoder import Model
from .model.heads import Head
from .prompt_cache.prefill import PromptCache
from .session import Session
from .settings.config import Speculation


class SessionKeeper:
    """Make sessions of a loaded model, and keep the last one.

    Attributes:
        idle_session: the session of the last request, while no request uses it.
    """

    def __init__(
        self,
        model: Model,
        draft: Model | Head | None,
        prefill_chunk: int,
        stores: TieredStoreFactory | None,
        prompts: PromptCache | None,
    ) -> None:
        self.model = model
        self.draft = draft
        self.stores = stores
        self.prompts = prompts
        self._prefill_chunk = prefill_chunk
        self.idle_session: Session | None = None
        self._reserved = 0

    def reserve(self, tokens: int) -> None:
        """Make new sessions with a capacity of at least `tokens`, so that a longer request can reuse the caches of a
        shorter one. Has no effect if RoPE depends on the length: then only requests of the same length share caches.
        """
        self._reserved = tokens

    def release(self) -> None:
        """Free the caches of the last request."""
        self.idle_session = None

    def forget(self) -> None:
        """Drop all cached tokens but keep the memory: the next request runs its whole prompt."""
        if self.idle_session is not None:
            self.idle_session.full.truncate(0)

    @contextmanager
    def _keeping(self, session: Session) -> Iterator[None]:
        """Keep the session for the next request, also if this one is closed or interrupted, or was wrong.

        A session in which anything else has failed may be half changed: it is dropped.
        """
        keeps = True
        try:
            yield
        except Exception as error:
            keeps = isinstance(error, UsageError)
            raise
        finally:
            if keeps:
                self.idle_session = session

    def _session(self, capacity: int, spare: int = 0, settings: Speculation | None = None) -> Session:
        """Return the idle session if it has room and the right cache, else a new one."""
        session, self.idle_session = self.idle_session, None
        settings = settings or Speculation()
        if session is not None and session.serves(capacity, spare, settings):
            return session
        del session  # free its memory before the new one is allocated
        if not self.model.shape.rope_depends_on_length:
            capacity = max(capacity, self._reserved)
        return self._new_session(capacity, spare, settings)

    def _new_session(
        self, capacity: int, spare: int, settings: Speculation, store: Store | None = None, scope: str = ""
    ) -> Session:
        prompts = self.prompts.scoped(scope) if self.prompts is not None and scope else self.prompts
        more = (self.stores, prompts, spare, settings, store)
        return Session(self.model, self.draft, capacity, self._prefill_chunk, *more)
