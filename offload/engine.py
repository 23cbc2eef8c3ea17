"""A loaded model that generates: token ids in, events out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from .batching.batch import Batch, BatchEvent
from .batching.lane import Lane
from .batching.memory import BatchMemory
from .batching.request import BatchRequest, Events
from .constraints.masks import TokenMasks
from .constraints.vocabulary import ConstraintVocabulary
from .errors import UsageError
from .evaluation.answers import answer_chances, most_tokens
from .events import Event, Prefilled
from .kernels.linear import multiplies_natively
from .kernels.native import Kernel, generate_on_one_thread, torch_on_one_thread
from .loading.prompt_checks import check_prompt, check_vocabulary, token_ids
from .loading.quantization_checks import check_kv
from .loading.quantized_copy import QuantizedCopies
from .memory.factory import TieredStoreFactory
from .memory.store import Store
from .model.decoder import Model, QuantizedCopy
from .model.heads import Head
from .planning.self_draft import best_level, expected_agreements, relative_costs
from .prompt_cache.fingerprint import TOKENS as PROMPT_BLOCK
from .prompt_cache.prefill import PromptCache
from .session import Session
from .settings.config import QUANTIZE, GenerationConfig, Sampling, Speculation
from .settings.constraint import Constraint
from .settings.kv_formats import KV_FORMATS
from .settings.method_sizes import (
    budget_of,
    check_approximate,
    check_forgetting,
    check_trees,
    forgets,
    has_draft_model,
    rounded_flag,
    tree_nodes,
    uses_copy,
)
from .settings.tree_settings import MOST_NODES
from .settings.validation import require, require_instance
from .short_repr import short_repr
from .speculation.drafters.heads import rows_needed
from .speculation.levels.lossless import Replay, replay
from .speculation.passes.runner import Runner
from .speculation.passes.steps import AT_ONCE, Executor
from .speculation.sampling.warp import Sampler

_Result = TypeVar("_Result")
Evaluation = Callable[[Runner], Generator[Prefilled, None, _Result]]


class Engine:
    """Generate with a loaded model, and a draft model if there is one: token ids in, events out, no text.

    The engine keeps the caches of the last request; the prefix that the next prompt shares with it is not run again.
    Two requests may run at once; the second one then gets its own caches.

    Attributes:
        model, draft: the target and the draft model.
        eos_ids: the tokens that end a run.
        prompts: the prompt cache on disk, or None.
        idle_session: the session of the last request, while no request uses it.
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
        copies: QuantizedCopies | None = None,
        constraints: ConstraintVocabulary | None = None,
    ) -> None:
        """`draft` is a draft model, or a head of `model`, which has the head's taps.

        Without `stores`, full caches are on the device; without `prompts`, no prompt is cached on disk.

        `dry_breakers` returns the ids of DRY's sequence breakers; it is called only for requests with DRY. `copies`
        makes quantised copies of the model for `draft="self"`; without it, the model drafts with its own weights.
        `constraints` makes the masks of constrained answers.
        """
        self.model, self.draft = model, draft
        self.stores, self.prompts = stores, prompts
        self._prefill_chunk = prefill_chunk
        self.idle_session: Session | None = None
        self._reserved = 0
        self._dry_breakers = dry_breakers
        self.eos_ids = frozenset(eos_ids)
        self._copies = copies
        self._constraints = constraints
        self._level: str | None = None  # of the copy, once it has been chosen
        self._batch_room: Callable[[int], int] | None = None

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

    def limit_batches(self, room: Callable[[int], int]) -> None:
        """Let a batch take at most so many bytes for keys and values as `room` returns for its `parallel` sequences.

        Without it, a batch takes what it needs, up to most of the free memory.
        """
        self._batch_room = room

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
        its whole prompt. Raises PromptError, when it is started, for ids outside the
        vocabulary and for more tokens than the model's context, which do not matter to a cache that forgets; and
        SettingsError for less than 0 log-probabilities.
        """
        settings = speculation or Speculation()
        ids = self._checked(ids, config, settings)
        session = self._session(len(ids) + config.max_new_tokens, tree_nodes(settings), settings)
        with self._keeping(session):
            events = self._events(session, ids, sampling, config, settings, logprobs)
            yield from generate_on_one_thread(self._kernel_of_all_models(), events)

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
        exception that is no TriforceError. All that in one thread.
        Raises SettingsError, when it is started, if `parallel` is less than 1.
        """
        require(parallel >= 1, f"parallel is {parallel}", "use 1 or more")
        batch, memory = Batch(parallel, in_step=self.model.group.size > 1), self._batch_memory(parallel)
        sequences = (
            None if request is None else (request.key, partial(self._start, request, memory), request.is_cancelled)
            for request in requests
        )
        events = batch.run(sequences)
        yield from generate_on_one_thread(self._kernel_of_all_models(), events)

    def _batch_memory(self, parallel: int) -> BatchMemory | None:
        """Return the pages of a batch's sequences; None where there are none, and each sequence has its own memory."""
        has_pages = (
            self.stores is None and self.model.operations.kernel is not None and KV_FORMATS[self.model.kv].is_plain
        )
        shape = self.model.shape
        has_pages = has_pages and shape.kv_layers == shape.layers and not shape.caps_scores
        if not has_pages:
            return None
        longest = self.model.shape.context + MOST_NODES
        limit = None if self._batch_room is None else self._batch_room(parallel)
        return BatchMemory(self.model, parallel, longest, limit, 1 if self.prompts is None else PROMPT_BLOCK)

    def _start(self, request: BatchRequest, memory: BatchMemory | None, lane: Lane) -> Events:
        """Return the events of a request, in caches of its own, with passes that the `lane` executes."""
        return request.text(self._in_new_session(request, memory, lane))

    def _in_new_session(self, request: BatchRequest, memory: BatchMemory | None, lane: Lane) -> Events:
        settings, config = request.speculation, request.config
        ids = self._checked(request.ids, config, settings)
        length, spare = len(ids) + config.max_new_tokens, tree_nodes(settings)
        if memory is None or settings.approximate is not None or rounded_flag(settings) is not None:
            session = self._new_session(length, spare, settings, scope=request.scope)
            yield from self._events(session, ids, request.sampling, config, settings, request.logprobs, lane)
            return
        fresh = rows_needed(self.draft, settings) if has_draft_model(settings) and isinstance(self.draft, Head) else 1
        allocation, shared = memory.allocate(ids, length, spare, lane, request.scope, fresh)
        try:
            session = self._new_session(length, spare, settings, allocation.store, request.scope)
            allocation.runner = session.full
            session.full.adopt(ids[:shared])
            yield from self._events(session, ids, request.sampling, config, settings, request.logprobs, lane)
        except Exception:
            allocation.runner = None  # what it has written is not to be shared
            raise
        finally:
            memory.free(allocation)

    def _events(
        self,
        session: Session,
        ids: list[int],
        sampling: Sampling,
        config: GenerationConfig,
        settings: Speculation,
        logprobs: int | None,
        executor: Executor = AT_ONCE,
    ) -> Events:
        require_instance("sampling", sampling, Sampling)
        hint = "use 0 for the tokens' own alone, or leave it out"
        require(logprobs is None or logprobs >= 0, f"logprobs is {short_repr(logprobs)}", hint)
        masks = self._masks(sampling, ids)
        copy, breakers = self.prepare(ids, config, settings), self._breakers(sampling)
        more = breakers, copy, executor, logprobs, masks
        return session.generate(ids, sampling, config, settings, self.eos_ids, *more)

    def _checked(self, ids: Sequence[int], config: GenerationConfig, settings: Speculation) -> list[int]:
        """Return the token ids of a request. Raises PromptError, and SettingsError for settings of another type."""
        require_instance("config", config, GenerationConfig)
        require_instance("speculation", settings, Speculation)
        ids, shape = token_ids(ids), self.model.shape
        if forgets(settings):
            check_forgetting(settings, shape.context)
        hint = "open the model with this speculation, or use the draft lookup"
        require(self.draft is not None or not has_draft_model(settings), "the draft model was not loaded", hint)
        check_approximate(settings, shape.family, not shape.is_uniform)
        check_kv(self.model.kv, settings, shape, missing=None)
        check_trees(settings, any(model.shape.linear for model in (self.model, self.draft) if model), shape.vocab)
        check_prompt(shape, ids, 0 if forgets(settings) else len(ids) + config.max_new_tokens)
        return ids

    def prepare(self, ids: Sequence[int], config: GenerationConfig, speculation: Speculation) -> QuantizedCopy | None:
        """Return the quantised copy of the model that drafts for a request, making it first if need be; None for none.

        `generate` does the same. Unless the request names the copy's level, it is chosen for the first such request:
        by how many choices rounding changes on the end of `ids`, and by the bytes that steps read.
        """
        if self._copies is None or not uses_copy(speculation):
            return None
        with torch_on_one_thread(self._kernel_of_all_models()):
            level = speculation.self_level or self._level
            if level is None:
                length = len(ids) + config.max_new_tokens
                level = self._level = self._choose_level(self._copies, ids, length, speculation)
            return self._copies.make(level, ids)

    def _choose_level(self, copies: QuantizedCopies, ids: Sequence[int], tokens: int, speculation: Speculation) -> str:
        agreements = expected_agreements(copies.changed_by_q4(ids))
        model, budget = self.model, budget_of(speculation, tokens)
        kv_cost = 1.0 if self.stores is None else self.stores.read_cost(model.shape)
        costs = relative_costs(model.shape, model.read_cost, model.dtype.itemsize, tokens, budget, kv_cost)
        level = best_level(agreements, costs)
        return QUANTIZE[int(model.group.agree([QUANTIZE.index(level)])[0])]  # ranks have uneven shares

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
        session = self._session(max(len(ids) + len(emitted), length))
        sampling = sampling or Sampling(temperature=0)
        model, breakers = self.model, self._breakers(sampling)
        masks = self._masks(sampling, ids[: len(ids) - generated])
        sampler = Sampler(sampling, seed, model.shape.vocab, model.device, breakers, model.operations.kernel, masks)
        with self._keeping(session), torch_on_one_thread(self._kernel_of_all_models()):
            return replay(session.full, ids, emitted, sampler, generated)

    def answers(
        self, ids: Sequence[int], constraint: Constraint, length: int, written: Sequence[int] = ()
    ) -> dict[tuple[int, ...], float]:
        """Return the tokens of each answer that a constraint allows after `ids`, and its probability at temperature 1.

        `length` is the sequence's limit, as for `replay`; `written` are tokens of the answer that came before, such as
        what a model thought. For few answers, such as several choices: see `answer_chances`. Raises SettingsError and
        PromptError as `generate` does.
        """
        ids, length = token_ids(ids), max(length, len(ids) + len(written) + most_tokens(constraint))
        check_prompt(self.model.shape, ids, length)
        masks = self._masks(Sampling(constraint=constraint), ids)
        assert masks is not None, "there is a constraint"
        masks.observe(written)
        session = self._session(length)
        with self._keeping(session), torch_on_one_thread(self._kernel_of_all_models()):
            return answer_chances(session.full, [*ids, *written], masks, self.eos_ids)

    def evaluate(
        self, ids: Sequence[int], run: Evaluation[_Result], speculation: Speculation | None = None, more: int = 0
    ) -> Generator[Prefilled, None, _Result]:
        """Return what `run` returns: an evaluation of package `evaluation`, given the runner of the target.

        The target runs on the full cache, or on the approximate one that `speculation` asks for. `ids` are the longest
        text that it runs, but for `more` tokens after it, in one session as `generate` does. Yields the progress of
        reading.
        Raises PromptError as `generate` does, when it is started.
        """
        ids, settings = token_ids(ids), speculation or Speculation()
        if forgets(settings):
            check_forgetting(settings, self.model.shape.context)
        length = len(ids) + more
        check_prompt(self.model.shape, ids, 0 if forgets(settings) else length)
        session = self._session(length, settings=settings)
        with self._keeping(session):
            return (yield from generate_on_one_thread(self._kernel_of_all_models(), run(session.full)))

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

    def _breakers(self, sampling: Sampling) -> Collection[int]:
        return self._dry_breakers() if sampling.dry_multiplier > 0 else ()

    def _masks(self, sampling: Sampling, prompt: Sequence[int]) -> TokenMasks | None:
        """Return the masks of an answer to a prompt. Raises SettingsError for a constraint that cannot be met."""
        if sampling.constraint is None:
            return None
        assert self._constraints is not None, "an engine without a tokenizer has no constraints"
        return self._constraints.masks(sampling.constraint, prompt)

    def _kernel_of_all_models(self) -> Kernel | None:
        """Return the native kernel if it computes all models: only then torch needs no threads of its own."""
        models = [self.model] if self.draft is None else [self.model, self.draft]
        kernels = [model.operations.kernel for model in models]
        return kernels[0] if all(kernels) else None

    def without_end(self) -> Engine:
        """Return an engine over the same models that ends at no token: in benchmarks, methods emit equally many."""
        more: dict[str, Any] = {"dry_breakers": self._dry_breakers, "copies": self._copies}
        more["constraints"] = self._constraints
        engine = Engine(self.model, (), self._prefill_chunk, self.draft, self.stores, self.prompts, **more)
        engine._batch_room = self._batch_room
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
        if self.stores is None:
            return where
        settings = self.stores.settings
        if settings.experts != "device":
            where += f", experts in host memory ({settings.experts})"
        if settings.resident_layers >= self.model.shape.kv_layers and settings.weight_layers is None:
            return where
        return f"{where}, KV offloaded ({settings.mode if settings.disk is None else 'disk'})"
