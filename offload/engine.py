"""A loaded model that generates: token ids in, events out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Sequence
from copy import copy
from functools import partial
from typing import TypeVar

from .batching.batch import Batch, BatchEvent
from .batching.lane import Lane
from .batching.memory import BatchMemory, has_pages
from .batching.request import BatchRequest, Events
from .batching.sessions import BatchSessions
from .caches.full import FullCache
from .constraints.vocabulary import ConstraintVocabulary
from .events import Event, Prefilled
from .kernels.linear import multiplies_natively
from .kernels.native import generate_on_one_thread, torch_on_one_thread
from .loading.prompt_checks import check_prompt, check_vocabulary, token_ids
from .memory.factory import TieredStoreFactory
from .model.decoder import Model
from .model.heads import Head
from .prompt_cache.fingerprint import TOKENS as PROMPT_BLOCK
from .prompt_cache.prompt import PromptCache
from .session.pool import SessionPool
from .session.session import Session
from .settings.config import GenerationConfig, Sampling, Speculation
from .settings.method_sizes import check_forgetting, forgets, tree_nodes
from .settings.tree_settings import MOST_NODES
from .settings.validation import require
from .speculation.levels.lossless import Replay, replay
from .speculation.passes.runner import Runner
from .speculation.sampling.samplers import Samplers

_Result = TypeVar("_Result")
Evaluation = Callable[[Runner[FullCache]], Generator[Prefilled, None, _Result]]


class Engine:
    """Generate with a loaded model, and a draft model if there is one: token ids in, events out, no text.

    The engine keeps the caches of the last request; the prefix that the next prompt shares with it is not run again.
    Two requests may run at once; the second one then gets its own caches.

    Attributes:
        model, draft: the target and the draft model.
        eos_ids: the tokens that end a run.
        stores: makes the tiered stores of full caches; None if these are on the device.
        sessions: the caches of the last request, and new ones.
    """

    def __init__(
        self,
        model: Model,
        eos_ids: Sequence[int],
        prefill_chunk: int,
        draft: Model | Head | None = None,
        stores: TieredStoreFactory | None = None,
        prompts: PromptCache | None = None,
        dry_breakers: Callable[[], Collection[int]] = tuple,
        constraints: ConstraintVocabulary | None = None,
    ) -> None:
        """`draft` is a draft model, or a head of `model`, which has the head's taps.

        `dry_breakers` returns the ids of DRY's sequence breakers; it is called only for requests with DRY.
        `constraints` makes the masks of constrained answers.
        """
        self.model, self.draft = model, draft
        self.eos_ids = frozenset(eos_ids)
        self.stores = stores
        self.sessions = SessionPool(model, draft, prefill_chunk, stores, prompts)
        self._samplers = Samplers(model, dry_breakers, constraints)
        self._batch_room: Callable[[int], int] | None = None
        kernels = [network.operations.kernel for network in (model, draft) if network is not None]
        self._kernel = kernels[0] if all(kernels) else None  # only then torch needs no threads of its own

    def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        config: GenerationConfig,
        speculation: Speculation | None = None,
        logprobs: int | None = None,
    ) -> Generator[Event, int | None]:
        """Prefill `ids`, then emit up to `config.max_new_tokens` tokens, one or more at a time.

        Yields Prefilled, then Speculated and Tokens for every verification, then one Finished. An end-of-sequence token
        ends the run and is not emitted. Without a seed in `config`, the seed is 0. The text layer handles stop strings
        (`text_stream.stream_text`): `send(n)` after Tokens keeps the first n of all emitted tokens and ends the run.
        With `logprobs`, Tokens have the log-probabilities of each token and of so many of the likeliest at its place.
        Closing the iterator at any point is safe; after an exception the caches are dropped, and the next request runs
        its whole prompt. When it is started, raises PromptError for ids outside the vocabulary, and for more tokens
        than the model's context unless the cache forgets; SettingsError for what the models cannot run.
        """
        request = BatchRequest(None, ids, sampling, config, speculation or Speculation(), logprobs=logprobs)
        settings, ids = request.speculation, request.checked_ids(self.model, self.draft)
        with self.sessions.session(len(ids) + config.max_new_tokens, tree_nodes(settings), settings) as session:
            yield from generate_on_one_thread(self._kernel, self._events(session, ids, request))

    def _events(self, session: Session, ids: list[int], request: BatchRequest, lane: Lane | None = None) -> Events:
        """Return the events of a request with the token `ids` in a session, with passes that a `lane` runs."""
        config, settings = request.config, request.speculation
        sampler = self._samplers.new(request.sampling, config.seed or 0, ids)
        return session.generate(ids, sampler, config, settings, self.eos_ids, lane, request.logprobs)

    def generate_batch(
        self, requests: Iterable[BatchRequest | None], parallel: int
    ) -> Generator[tuple[Hashable, BatchEvent], int | None]:
        """Generate for several prompts, up to `parallel` of them together; yield their events, each with its key.

        A sequence has the events that `generate` yields for it, and with the native kernel, greedy or coupled, the same
        tokens, whatever runs beside it; otherwise tokens of the same distribution, for drafts depend on measured times.
        Requests are taken one by one, whenever another sequence can join. None among them says that none is ready: the
        next one is asked for after another pass, and if no sequence runs the batch ends. A request that raises an
        exception ends with Failed, one that is cancelled with Cancelled before the next pass, and the others go on.
        Closing the iterator ends all, as do KeyboardInterrupt and SystemExit, and where several ranks run together an
        exception that is no TriforceError. When it is started, raises SettingsError if `parallel` is less than 1.
        """
        require(parallel >= 1, f"parallel is {parallel}", "use 1 or more")
        batch = Batch(parallel, in_step=self.model.group.size > 1)
        sessions = BatchSessions(self.sessions, self._batch_memory(parallel), self.draft)
        sequences = (
            None
            if request is None
            else Lane(request.key, partial(self._start, request, sessions), request.is_cancelled)
            for request in requests
        )
        yield from generate_on_one_thread(self._kernel, batch.run(sequences))

    def _batch_memory(self, parallel: int) -> BatchMemory | None:
        """Return the pages of a batch's sequences; None where there are none, and each sequence has its own memory."""
        if self.stores is not None or not has_pages(self.model):
            return None
        longest = self.model.shape.context + MOST_NODES
        limit = None if self._batch_room is None else self._batch_room(parallel)
        return BatchMemory(self.model, parallel, longest, limit, 1 if self.prompts is None else PROMPT_BLOCK)

    def _start(self, request: BatchRequest, sessions: BatchSessions, lane: Lane) -> Events:
        """Return the events of a request, in a session of its own, with passes that the `lane` executes."""
        return request.text(self._in_batch(request, sessions, lane))

    def _in_batch(self, request: BatchRequest, sessions: BatchSessions, lane: Lane) -> Events:
        ids = request.checked_ids(self.model, self.draft)
        with sessions.session(request, ids, lane) as session:
            yield from self._events(session, ids, request, lane)

    def replay(
        self,
        ids: Sequence[int],
        emitted: Sequence[int],
        sampling: Sampling | None = None,
        length: int = 0,
        generated: int = 0,
        seed: int = 0,
    ) -> Replay:
        """Decode plainly after `ids`, with the penalties of `sampling`; compare with the emitted tokens.

        Decoding is greedy, unless `sampling` is coupled: then it uses the noise of `seed`, as `generate` does.

        `length` is the sequence's limit, prompt and `max_new_tokens`, if it is more than its actual length: some RoPE
        scalings depend on it. The last `generated` of `ids` count as generated tokens, for the penalties that need it.
        Raises PromptError as `generate` does.
        """
        ids, emitted = token_ids(ids), token_ids(emitted)
        check_prompt(self.model.shape, ids, len(ids) + len(emitted))
        check_vocabulary(self.model.shape, emitted)
        sampler = self._samplers.new(sampling or Sampling(temperature=0), seed, ids[: len(ids) - generated])
        capacity = max(len(ids) + len(emitted), length)
        with self.sessions.session(capacity) as session, torch_on_one_thread(self._kernel):
            return replay(session.full, ids, emitted, sampler, generated)

    def evaluate(
        self, ids: Sequence[int], run: Evaluation[_Result], speculation: Speculation | None = None, more: int = 0
    ) -> Generator[Prefilled, None, _Result]:
        """Return what `run` returns: an evaluation of package `evaluation`, given the runner of the target.

        The target runs on the full cache, or on the approximate one that `speculation` asks for. `ids` are the longest
        text that it runs, but for `more` tokens after it, in one session as `generate` does. Yields the progress of
        reading. Raises PromptError as `generate` does.
        """
        ids, settings = token_ids(ids), speculation or Speculation()
        if forgets(settings):
            check_forgetting(settings, self.model.shape.context)
        length = len(ids) + more
        check_prompt(self.model.shape, ids, 0 if forgets(settings) else length)
        with self.sessions.session(length, settings=settings) as session:
            return (yield from generate_on_one_thread(self._kernel, run(session.full)))

    @property
    def prompts(self) -> PromptCache | None:
        """Return the prompt cache on disk, or None."""
        return self.sessions.prompts

    @property
    def idle_session(self) -> Session | None:
        """Return the session of the last request, while no request uses it."""
        return self.sessions.idle

    def reserve(self, tokens: int) -> None:
        """Make new sessions with a capacity of at least `tokens`, so that a longer request can reuse the caches of a
        shorter one. Has no effect if RoPE depends on the length: then only requests of the same length share caches.
        """
        self.sessions.reserved = tokens

    def release(self) -> None:
        """Free the caches of the last request."""
        self.sessions.idle = None

    def forget(self) -> None:
        """Drop all cached tokens but keep the memory: the next request runs its whole prompt."""
        if self.sessions.idle is not None:
            self.sessions.idle.full.truncate(0)

    def limit_batches(self, room: Callable[[int], int]) -> None:
        """Let a batch take at most so many bytes for keys and values as `room` returns for its `parallel` sequences.

        Without it, a batch takes what it needs, up to most of the free memory.
        """
        self._batch_room = room

    def without_end(self) -> Engine:
        """Return an engine over the same models that ends at no token: in benchmarks, methods emit equally many."""
        engine = copy(self)
        engine.eos_ids, engine.sessions = frozenset(), self.sessions.emptied()
        return engine

    def describe(self) -> str:
        """Return device, dtype, kernel, ranks and offloading as text: everything that may affect rounding."""
        where = f"{self.model.device.type}, {str(self.model.dtype).removeprefix('torch.')}"
        kernel = self.model.operations.kernel
        if kernel is not None:
            where += f", {kernel.level} kernel"
        elif not multiplies_natively(self.model.device.type, self.model.dtype):
            where += " (blocks of rows in float32)"
        if self.model.group.size > 1:
            where += f", {self.model.group.size} ranks"
        return where if self.stores is None else where + self.stores.describe(self.model.shape)
