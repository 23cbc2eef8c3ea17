"""A session: one sequence and its caches, kept between requests so that a shared prefix is not prefilled again."""

import time
from collections.abc import Generator, Sequence
from typing import cast

from ..caches.full import FullCache
from ..events import Event, Finished, Pinned, Tokens
from ..memory.factory import TieredStoreFactory
from ..memory.store import Store
from ..model.decoder import Model
from ..model.heads import Head
from ..prompt_cache.prefill import CachedPrefill
from ..prompt_cache.prompt import PromptCache
from ..sequence import TokenSequence
from ..settings.config import LONGEST_GAMMA, GenerationConfig, Speculation
from ..settings.method_sizes import drafter_kind, drafting_from_planes, forgets, sized
from ..settings.methods import LOOKUP
from ..speculation.levels.approximate import approximate_runner, approximation
from ..speculation.levels.hierarchy import Hierarchy, build
from ..speculation.passes.runner import Runner
from ..speculation.passes.steps import Lane
from ..speculation.sampling.warp import Sampler
from .runners import SessionRunners


class Session:
    """One sequence of up to `capacity` tokens, with its caches and runners."""

    def __init__(
        self,
        model: Model,
        draft: Model | Head | None,
        capacity: int,
        chunk: int,
        stores: TieredStoreFactory | None = None,
        prompts: PromptCache | None = None,
        spare: int = 0,
        settings: Speculation | None = None,
        store: Store | None = None,
    ) -> None:
        """`spare`: further positions of the full cache, for the tokens of a tree.

        An approximate cache that `settings` ask for takes the full cache's place; `stores` and `prompts` are then not
        used. The full cache is in `store` if that is given, else in one of `stores` or on the device.
        """
        self.sequence = TokenSequence()
        self._approximation = approximation(settings)
        if settings is not None and self._approximation is not None:
            # Plain decoding asks an approximate cache for nothing that a full one alone has.
            self.full, stores = cast(Runner[FullCache], approximate_runner(model, settings, chunk)), None
        else:
            if stores is not None:
                store = stores.new_store(model.shape, capacity + spare, model.dtype)
            by_layers = stores is not None and stores.settings.by_layers and model.shape.runs_by_layers
            self.full = Runner(model, model.new_cache(capacity + spare, model.rope(capacity), store), chunk, by_layers)
        self._link = None if stores is None else stores.link
        is_cached = prompts is not None and self.full.cache.is_dumpable
        self._prompts = CachedPrefill(prompts, self.full) if prompts is not None and is_cached else None
        self._model = model
        self._capacity, self._spare = capacity, spare
        self.runners = SessionRunners(self.full, draft)

    def serves(self, capacity: int, spare: int = 0, settings: Speculation | None = None) -> bool:
        """Return whether a sequence that may reach `capacity` tokens fits these caches and their RoPE."""
        if approximation(settings) != self._approximation:
            return False
        if settings is not None and forgets(settings):
            return True
        if capacity > self._capacity or capacity + spare > self._capacity + self._spare:
            return False
        return capacity == self._capacity or not self._model.shape.rope_depends_on_length

    def generate(
        self,
        ids: Sequence[int],
        sampler: Sampler,
        config: GenerationConfig,
        settings: Speculation,
        eos_ids: frozenset[int],
        lane: Lane | None = None,
        logprobs: int | None = None,
    ) -> Generator[Event, int | None]:
        """See Engine.generate.

        The `sampler` is a new one; a `lane` of a batch runs all passes.
        """
        sequence = self.sequence
        sequence.restart(ids)
        store = self.full.cache.store
        if store.has_planes:
            settings = drafting_from_planes(settings)
        runners = self.runners.choose(settings, len(ids) + config.max_new_tokens)
        runners.use(lane)
        runners.expect(sized(settings, len(ids) + config.max_new_tokens))
        for done, total in store.prepare():
            yield Pinned(done, total)
        yield from (self.full if self._prompts is None else self._prompts).prefill(sequence)
        if runners.draft is not None:
            yield from runners.draft.read(sequence)
        if runners.middle is not None:
            runners.middle.prepare()  # the others have recorded their passes before they read the prompt
        if drafter_kind(settings) == LOOKUP:
            runners.lookup.draft_kind(sequence)  # reading the prompt is no part of decoding
        sampler.observe_prompt(sequence.tokens)
        more = self._model.group, config.max_new_tokens, logprobs
        hierarchy = build(runners, settings, sampler, time.perf_counter if lane is None else lane.clock, *more)
        yield from self._decode(hierarchy, sampler, config.max_new_tokens, eos_ids, logprobs is not None)

    def _decode(
        self,
        hierarchy: Hierarchy,
        sampler: Sampler,
        limit: int,
        eos_ids: frozenset[int],
        has_logprobs: bool,
    ) -> Generator[Event, int | None]:
        """Decode up to `limit` tokens after the prompt.

        Tokens that a constraint dictates are appended without a pass: the next pass runs them with those that follow,
        or alone if they are many. Where log-probabilities are wanted, they are decoded: these come from a pass.
        """
        sequence, end = self.sequence, len(self.sequence) + limit
        prompt = len(sequence)
        while (start := len(sequence)) < end:
            ended = False
            if not has_logprobs and (forced := sampler.forced(end - start)):
                sequence.extend(forced)
                ended = self._keep_until(eos_ids, start, sampler)
            if not ended and (decoded := len(sequence)) < end:
                if decoded - self.full.num_cached > LONGEST_GAMMA:  # more than small caches take beside a draft
                    self.full.rows(sequence)
                hierarchy.top.advance(sequence, end - decoded)
                ended = self._keep_until(eos_ids, decoded, sampler)
            run = sequence.tokens[start:]
            yield hierarchy.statistics(sampler.mask_statistics)
            if self._link is not None:
                yield self._link.statistics.event()
            if self._model.experts_run is not None:
                yield self._model.experts_run()
            kept = (yield Tokens(tuple(run), hierarchy.top.logprobs[: len(run)])) if run else None
            if kept is not None:
                self._cut(prompt + kept)
                yield Finished("stop")
                return
            if ended:
                yield Finished("eos")
                return
        yield Finished("length")

    def _keep_until(self, eos_ids: frozenset[int], start: int, sampler: Sampler) -> bool:
        """Commit the tokens from `start` on, up to an end-of-sequence token; return whether there was one."""
        new = self.sequence.tokens[start:]
        ended = not eos_ids.isdisjoint(new)
        if ended:
            new = new[: next(at for at, token in enumerate(new) if token in eos_ids)]
            self._cut(start + len(new))
        self.sequence.commit()
        sampler.observe(new)
        return ended

    def _cut(self, length: int) -> None:
        self.sequence.truncate(length)
        self.full.settle(self.sequence)
