"""A loaded model that generates: token ids in, events out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from typing import TypeVar

from .config import QUANTIZE, GenerationConfig, Sampling, Speculation
from .decoder import Model, QuantizedCopy
from .errors import PromptError
from .events import Event, Prefilled
from .kernels.linear import multiplies_natively
from .kernels.native import Kernel, generate_on_one_thread, torch_on_one_thread
from .levels import check_forgetting, forgets, tree_nodes, uses_copy
from .loading.quantized_copy import QuantizedCopies
from .offloading import LINK_COST, TieredStoreFactory
from .planning.self_draft import best_level, expected_agreements, relative_costs
from .prompt_cache.prefill import PromptCache
from .session import Session
from .short_repr import short_repr
from .speculation.lossless import Replay, replay
from .speculation.runner import Runner
from .speculation.sampling import Sampler

_Result = TypeVar("_Result")
Evaluation = Callable[[Runner], Generator[Prefilled, None, _Result]]


class Engine:
    """A loaded model, and a draft model if there is one. It works on tokens, not text.

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
        draft: Model | None = None,
        stores: TieredStoreFactory | None = None,
        prompts: PromptCache | None = None,
        dry_breakers: Callable[[], Collection[int]] = tuple,
        copies: QuantizedCopies | None = None,
    ) -> None:
        """Without `stores`, full caches are on the device; without `prompts`, no prompt is cached on disk.

        `dry_breakers` returns the ids of DRY's sequence breakers; it is called only for requests with DRY. `copies`
        makes quantised copies of the model for `draft="self"`; without it, the model drafts with its own weights.
        """
        self.model = model
        self.stores = stores
        self.prompts = prompts
        self._dry_breakers = dry_breakers
        self.draft = draft
        self.eos_ids = frozenset(eos_ids)
        self._prefill_chunk = prefill_chunk
        self._copies = copies
        self._level: str | None = None  # of the copy, once it has been chosen
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

    def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        config: GenerationConfig,
        speculation: Speculation | None = None,
    ) -> Generator[Event, int | None]:
        """Prefill `ids`, then emit up to `config.max_new_tokens` tokens, one or more at a time.

        Yields Prefilled, then Speculated and Tokens for every verification, then one Finished. An end-of-sequence token
        ends the run and is not emitted. Without a seed in `config`, the seed is 0. The text layer handles stop strings
        (`tokenizer.stream_text`): `send(n)` after Tokens keeps only the first n of all emitted tokens and ends the run.
        Closing the iterator at any point is safe. Raises PromptError, when it is started, for ids outside the
        vocabulary and for more tokens than the model's context, which do not matter to a cache that forgets.
        """
        ids = _token_ids(ids)
        settings, breakers = speculation or Speculation(), self._breakers(sampling)
        length = len(ids) + config.max_new_tokens
        if forgets(settings):
            check_forgetting(settings, self.model.shape.context)
        self._check(ids, 0 if forgets(settings) else length)
        session = self._session(length, tree_nodes(settings), settings)
        try:
            copy = self.prepare(ids, config, settings)
            events = session.generate(ids, sampling, config, settings, self.eos_ids, breakers, copy)
            yield from generate_on_one_thread(self._kernel_of_all_models(), events)
        finally:
            self.idle_session = session

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
                level = self._level = self._choose_level(ids, len(ids) + config.max_new_tokens, speculation.budget)
            return self._copies.make(level, ids)

    def _choose_level(self, ids: Sequence[int], tokens: int, budget: int) -> str:
        agreements = expected_agreements(self._copies.changed_by_q4(ids))
        kv_cost = 1.0 if self.stores is None else LINK_COST
        model = self.model
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
        ids, emitted = _token_ids(ids), _token_ids(emitted)
        self._check(ids, len(ids) + len(emitted))
        self._check_vocabulary(emitted)
        session = self._session(max(len(ids) + len(emitted), length))
        sampling = sampling or Sampling(temperature=0)
        model, breakers = self.model, self._breakers(sampling)
        sampler = Sampler(sampling, seed, model.shape.vocab, model.device, breakers, model.operations.kernel)
        try:
            with torch_on_one_thread(self._kernel_of_all_models()):
                return replay(session.full, ids, emitted, sampler, generated)
        finally:
            self.idle_session = session

    def evaluate(
        self, ids: Sequence[int], run: Evaluation[_Result], speculation: Speculation | None = None
    ) -> Generator[Prefilled, None, _Result]:
        """Return what `run` returns: an evaluation of package `evaluation`, given the runner of the target.

        The target runs on the full cache, or on the approximate one that `speculation` asks for. `ids` are the longest
        text that it runs, in one session as `generate` does. Yields the progress of reading.
        Raises PromptError as `generate` does, when it is started.
        """
        ids, settings = _token_ids(ids), speculation or Speculation()
        if forgets(settings):
            check_forgetting(settings, self.model.shape.context)
        self._check(ids, 0 if forgets(settings) else len(ids))
        session = self._session(len(ids), settings=settings)
        try:
            return (yield from generate_on_one_thread(self._kernel_of_all_models(), run(session.full)))
        finally:
            self.idle_session = session

    def forget(self) -> None:
        """Drop all cached tokens but keep the memory: the next request runs its whole prompt."""
        if self.idle_session is not None:
            self.idle_session.full.truncate(0)

    def _breakers(self, sampling: Sampling) -> Collection[int]:
        return self._dry_breakers() if sampling.dry_multiplier > 0 else ()

    def _check(self, ids: Sequence[int], length: int) -> None:
        if not ids:
            raise PromptError("the prompt is empty", "give at least one token")
        self._check_vocabulary(ids)
        if length > (context := self.model.shape.context):
            raise PromptError(
                f"{length:,} tokens, prompt and answer, exceed the model's context of {context:,}",
                "shorten the prompt, ask for fewer new tokens, or stretch the context (OpenModel.stretched)",
            )

    def _check_vocabulary(self, ids: Sequence[int]) -> None:
        vocab = self.model.shape.vocab
        for wrong in {min(ids, default=0), max(ids, default=0)}:
            if not 0 <= wrong < vocab:
                raise PromptError(
                    f"token id {wrong:,} at position {ids.index(wrong):,} is not in the vocabulary of {vocab:,} tokens",
                    "encode the text with this model's tokenizer",
                )

    def _session(self, capacity: int, spare: int = 0, settings: Speculation | None = None) -> Session:
        """Return the idle session if it has room and the right cache, else a new one."""
        session, self.idle_session = self.idle_session, None
        settings = settings or Speculation()
        if session is not None and session.serves(capacity, spare, settings):
            return session
        del session  # free its memory before the new one is allocated
        if not self.model.shape.rope_depends_on_length:
            capacity = max(capacity, self._reserved)
        more = (self.stores, self.prompts, spare, settings)
        return Session(self.model, self.draft, capacity, self._prefill_chunk, *more)

    def _kernel_of_all_models(self) -> Kernel | None:
        """Return the native kernel if it computes all models: only then torch needs no threads of its own."""
        models = [self.model] if self.draft is None else [self.model, self.draft]
        kernels = [model.operations.kernel for model in models]
        return kernels[0] if all(kernels) else None

    def without_end(self) -> Engine:
        """Return an engine over the same models that ends at no token: in benchmarks, methods emit equally many."""
        more = {"dry_breakers": self._dry_breakers, "copies": self._copies}
        return Engine(self.model, (), self._prefill_chunk, self.draft, self.stores, **more)

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
        return f"{where}, KV offloaded ({settings.mode if settings.disk is None else 'disk'})"


def _token_ids(ids: Iterable[int]) -> list[int]:
    """Return token ids as a list of ints, from any integers or a tensor or array with one axis. Raises PromptError."""
    result = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if set(map(type, result)) <= {int}:
        return result  # a million tokens are checked ten times as fast so
    for position, token in enumerate(result):
        if type(token) is not int:
            if isinstance(token, bool) or not hasattr(token, "__index__"):
                wrong = f"{short_repr(token)} at position {position:,} is no token id"
                raise PromptError(wrong, "give a list of whole numbers, as the tokenizer's encode returns")
            result[position] = int(token)
    return result
