"""A loaded model that generates: token ids in, events out."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence

from .config import GenerationConfig, Sampling, Speculation
from .decoder import Model
from .errors import PromptError
from .events import Event
from .kernels.linear import multiplies_natively
from .kernels.native import Kernel, generate_on_one_thread, torch_on_one_thread
from .offloading import TieredStoreFactory
from .prompt_cache.prefill import PromptCache
from .session import Session
from .short_repr import short_repr
from .speculation.lossless import Replay, replay


class Engine:
    """A loaded model, and a draft model if there is one. It knows tokens, not text.

    The caches of the last request are kept, and the prefix that the next prompt shares with it is not run again. Two
    requests may run at once; the second one then gets caches of its own.
    """

    def __init__(
        self,
        model: Model,
        eos_ids: Sequence[int],
        prefill_chunk: int,
        draft: Model | None = None,
        stores: TieredStoreFactory | None = None,
        prompts: PromptCache | None = None,
    ) -> None:
        """`stores` makes full caches that do not lie on the device as a whole; `prompts` keeps prompts on disk."""
        self.model = model
        self.stores = stores
        self._prompts = prompts
        self._draft = draft
        self._eos_ids = frozenset(eos_ids)
        self._prefill_chunk = prefill_chunk
        self._idle: Session | None = None
        self._reserved = 0

    def reserve(self, tokens: int) -> None:
        """Give sessions made from now on room for `tokens` at least, so that a longer request can use the caches of a
        shorter one. Has no effect if RoPE depends on the length: then only requests of the same length share caches.
        """
        self._reserved = tokens

    def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        config: GenerationConfig,
        speculation: Speculation | None = None,
    ) -> Generator[Event, int | None]:
        """Prefill `ids`, then emit up to `config.max_new_tokens` tokens, a run of them at a time.

        Yields Prefilled, then Speculated and Tokens for every verification, then one Finished. An end-of-sequence token
        ends the run and is not emitted. Without a seed in `config`, the seed is 0. Stop strings are the text layer's
        (`tokenizer.stream_text`): `send(n)` in answer to Tokens keeps only the first n of all emitted tokens and ends
        the run. Closing the iterator at any point is safe. Raises PromptError, when it is started, for ids outside the
        vocabulary and for more tokens than the model's context.
        """
        ids = _token_ids(ids)
        self._check(ids, len(ids) + config.max_new_tokens)
        session = self._session(len(ids) + config.max_new_tokens)
        try:
            events = session.generate(ids, sampling, config, speculation or Speculation(), self._eos_ids)
            yield from generate_on_one_thread(self._kernel_of_all_models(), events)
        finally:
            self._idle = session

    def replay(
        self, ids: Sequence[int], emitted: Sequence[int], sampling: Sampling | None = None, length: int = 0
    ) -> Replay:
        """Decode plainly and greedily after `ids`, with the penalty of `sampling`; compare with the emitted tokens.

        `length` is what the sequence might have reached, prompt and `max_new_tokens`, if that is more than what it has:
        some RoPE scalings depend on it. Raises PromptError as `generate` does.
        """
        ids, emitted = _token_ids(ids), _token_ids(emitted)
        self._check(ids, len(ids) + len(emitted))
        self._check_vocabulary(emitted)
        session = self._session(max(len(ids) + len(emitted), length))
        try:
            with torch_on_one_thread(self._kernel_of_all_models()):
                return replay(session.full, ids, emitted, sampling or Sampling(temperature=0))
        finally:
            self._idle = session

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

    def _session(self, capacity: int) -> Session:
        """Return the idle session if it has room, else a new one."""
        session, self._idle = self._idle, None
        if session is not None and session.serves(capacity):
            return session
        del session  # its memory first
        if not self.model.shape.rope_depends_on_length:
            capacity = max(capacity, self._reserved)
        return Session(self.model, self._draft, capacity, self._prefill_chunk, self.stores, self._prompts)

    def _kernel_of_all_models(self) -> Kernel | None:
        """Return the native kernel if it computes all models: only then torch needs no threads of its own."""
        models = [self.model] if self._draft is None else [self.model, self._draft]
        kernels = [model.operations.kernel for model in models]
        return kernels[0] if all(kernels) else None

    def without_end(self) -> Engine:
        """Return an engine over the same models that no token ends, so that benchmarked methods emit equally many."""
        return Engine(self.model, (), self._prefill_chunk, self._draft, self.stores)

    def describe(self) -> str:
        """Return device, dtype, kernel, ranks and offloading as text: everything that rounding may depend on."""
        where = f"{self.model.device.type}, {str(self.model.dtype).removeprefix('torch.')}"
        kernel = self.model.operations.kernel
        if kernel is not None:
            where += f", {kernel.level} kernel"
        elif not multiplies_natively(self.model.device.type, self.model.dtype):
            where += " (blocks of rows in float32)"
        if self.model.group.size > 1:
            where += f", {self.model.group.size} ranks"
        return where if self.stores is None else f"{where}, KV offloaded ({self.stores.settings.mode})"


def _token_ids(ids: Iterable[int]) -> list[int]:
    """Return token ids as a list: of integers of any kind, or a tensor or array with one axis. Raises PromptError."""
    found = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    for place, each in enumerate(found):
        if type(each) is not int:
            if isinstance(each, bool) or not hasattr(each, "__index__"):
                wrong = f"{short_repr(each)} at position {place:,} is no token id"
                raise PromptError(wrong, "give a list of whole numbers, as the tokenizer's encode returns")
            found[place] = int(each)
    return found
