"""Opens a model in one call and asks it about texts: text in, text out, over the engine that knows tokens alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ..batching.batch import Failed
from ..batching.request import BatchRequest
from ..engine import Engine
from ..errors import PromptError, TriforceError
from ..events import Finished, Text
from ..loading.prompt_checks import check_text
from ..loading.tokenizers.text_stream import TextLayer, stream_text
from ..loading.tokenizers.tokenizer import Tokenizer
from ..memory.tier_settings import TierSettings
from ..planning.memory import USABLE, Tier, check_fit
from ..settings.config import DEFAULT_MODEL, EngineConfig, GenerationConfig, Sampling, Speculation
from ..settings.method_sizes import stored_tokens
from ..settings.validation import require, require_instance, require_tokens
from ..short_repr import short_repr
from ..system.machine import free_memory
from .ask_options import Answer, Asked, AskOptions, BatchAnswer, join_texts, resolve
from .loader import open_model
from .opened_model import OpenModel

if TYPE_CHECKING:
    from typing_extensions import Unpack

ROOM = 1024  # tokens beyond a request, so that the next, longer question about the same text finds its caches


@dataclass(frozen=True, slots=True)
class _Question:
    """A prompt's tokens, and how to go on from them."""

    ids: list[int]
    sampling: Sampling
    config: GenerationConfig
    layer: TextLayer


class LLM:
    """Open a model and ask it about texts.

        llm = LLM("smollm2-135m")
        for piece in llm.ask(book, "Who is Alice?"):
            print(piece, end="", flush=True)

    The model is found and checked at once, and its weights are loaded with the first question, when it is known how
    much memory is needed beside them. Questions are answered one at a time; a question that begins as the last one did,
    such as another one about the same text, runs only what differs.

    Attributes:
        opened: the opened model, with its `shape`, `device` and `tokenizer`.
        speculation: the decoding method of all questions.
    """

    def __init__(
        self,
        model: str | PathLike[str] | EngineConfig = DEFAULT_MODEL,
        *,
        speculation: Speculation | None = None,
        tiers: TierSettings | None = None,
        max_length: int | None = None,
        home: Path | None = None,
    ) -> None:
        """Find a model, fetching it if necessary, and check its files.

        Args:
            model: a name, a folder, a .gguf file or a hub id; an EngineConfig also has the device, dtype and more.
            speculation: the decoding method; None for the default. It changes the speed, not the text.
            tiers: how the KV cache is spread over device, host memory and disk; None keeps it on the device.
            max_length: tokens of the longest prompt and answer, for which memory is reserved with the first question;
                None reserves what each needs, and a little more.
            home: triforce's cache folder; None for the platform's.

        Raises ModelNotFound, UnsupportedModel, CheckpointError, FetchError, SettingsError; OutOfMemory for a
        `max_length` beyond the memory.
        """
        self.opened: OpenModel = open_model(model, home, speculation=speculation)
        self.speculation = self.opened.speculation
        if tiers is not None:
            require_instance("tiers", tiers, TierSettings)
        self._tiers, self._reserved = tiers, 0
        if max_length is not None:
            require(type(max_length) is int, f"max_length is {short_repr(max_length)}", "use a number of tokens")
            require_tokens("max_length", max_length, 2, "use a number of tokens, such as 8192")
            context = self.opened.checkpoint.shape.context
            beyond = f"max_length is {max_length:,}, and the model's context has {context:,} tokens"
            require(max_length <= context, beyond, f"use {context} or fewer, or a model with a longer context")
            self._reserve(max_length)

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer: `encode(text)`, `decode(ids)`."""
        return self.opened.tokenizer

    @property
    def sampling(self) -> Sampling:
        """Return the model's own sampling, which the options of a question override."""
        return self.opened.sampling

    @cached_property
    def engine(self) -> Engine:
        """Return the engine, loading the weights on first use. It takes token ids and yields events."""
        engine = self.opened.load(tiers=self._tiers, capacity=self._reserved)
        engine.reserve(self._reserved)
        return engine

    def ask(self, text: str, question: str = "", **options: Unpack[AskOptions]) -> Answer:
        """Return the answer to a question about a text, or to the text alone, as an iterator of pieces.

        Text and question are one user message in the model's chat template; a model without one continues the text.
        `options` are those of AskOptions, such as `temperature=0`, `seed=1` or `stop="\\n"`.

        Raises PromptError if the prompt is not text or exceeds the context, SettingsError for wrong options, and
        OutOfMemory if weights and KV cache do not fit.
        """
        request = self._question(text, question, options)
        length = len(request.ids) + request.config.max_new_tokens
        if length > self._reserved:
            self._reserve(length + ROOM)
        events = self.engine.generate(request.ids, request.sampling, request.config, self.speculation)
        return Answer(stream_text(events, request.layer))

    def session(self, text: str, room: int = 2 * ROOM) -> DocumentSession:
        """Return what answers several questions about one text, whose keys and values it keeps from the first one on.

        `room` is the tokens that a question and its answer may take without reading the text again. Raises PromptError
        for what is not text, OutOfMemory if weights and KV cache do not fit.
        """
        require(type(room) is int, f"room is {short_repr(room)}", "use a number of tokens, such as 2048")
        require_tokens("room", room, 1, "use a number of tokens, such as 2048")
        self._reserve(max(self._reserved, len(self.tokenizer.encode(text)) + room))
        return DocumentSession(self, text)

    def batch(
        self, prompts: Iterable[str | tuple[str, str]], *, parallel: int = 8, **options: Unpack[AskOptions]
    ) -> Iterator[BatchAnswer]:
        """Answer many prompts, up to `parallel` of them together, and yield each answer when it is complete.

        A prompt is a text, or a text and a question; they are taken one by one. Texts that begin alike share the keys
        and values of that beginning. `options` are those of `ask`, for all. An error ends one answer, which holds it,
        and no other. Raises SettingsError for wrong options.
        """
        require(type(parallel) is int and parallel >= 1, f"parallel is {short_repr(parallel)}", "use 1 or more")
        resolve(options, self.sampling)
        return self._batch(prompts, 1 if self._tiers is not None else parallel, options)

    def _batch(
        self, prompts: Iterable[str | tuple[str, str]], parallel: int, options: AskOptions
    ) -> Iterator[BatchAnswer]:
        refused: list[BatchAnswer] = []
        texts: dict[int, list[str]] = {}

        def requests() -> Iterator[BatchRequest]:
            for index, prompt in enumerate(prompts):
                try:
                    text, question = prompt if isinstance(prompt, tuple) and len(prompt) == 2 else (prompt, "")
                    request = self._question(text, question, options)
                except TriforceError as error:
                    refused.append(BatchAnswer(index, "", None, error))
                    continue
                texts[index] = []
                settings = request.sampling, request.config, self.speculation
                yield BatchRequest(index, request.ids, *settings, partial(stream_text, layer=request.layer))

        with closing(self.engine.generate_batch(requests(), parallel)) as events:
            for key, event in events:
                while refused:
                    yield refused.pop(0)
                index = cast(int, key)
                if isinstance(event, Text):
                    texts[index].append(event.text)
                elif isinstance(event, Finished):
                    yield BatchAnswer(index, "".join(texts.pop(index)), event.reason)
                elif isinstance(event, Failed):
                    yield BatchAnswer(index, "".join(texts.pop(index)), None, event.error)
        yield from refused

    def _question(self, text: str, question: str, options: AskOptions) -> _Question:
        """Encode a question. Raises PromptError, SettingsError."""
        asked = resolve(options, self.sampling)
        if asked.sampling.constraint is not None:
            self.opened.constraints.check(asked.sampling.constraint)
        check_text(text)
        check_text(question, "the question")
        ids = self._encode(join_texts([text, question]) if question else text, asked)
        new_tokens = self.opened.new_tokens(len(ids), asked.config.max_new_tokens, asked.is_limited)
        layer = TextLayer.after(self.tokenizer, ids, asked.config.stop, self.tokenizer.has_chat_template)
        sampling = asked.sampling.in_chat(self.tokenizer.has_chat_template)
        return _Question(ids, sampling, replace(asked.config, max_new_tokens=new_tokens), layer)

    def _encode(self, text: str, asked: Asked) -> list[int]:
        if self.tokenizer.has_chat_template:
            return self.tokenizer.chat(text, asked.system, think=asked.think)
        for name, value in (("system", asked.system), ("think", asked.think)):
            if value is not None:
                raise PromptError(f"this model has no chat template, which {name} needs", f"leave {name} out")
        return self.tokenizer.encode(text)

    def _reserve(self, length: int) -> None:
        """Let sequences of `length` tokens, at most the context, share caches. Raises OutOfMemory before allocating."""
        length = min(length, self.opened.checkpoint.shape.context)
        is_loaded = "engine" in vars(self)
        if self._tiers is None:
            taken = self._estimate(self._reserved).total if is_loaded else 0
            check_fit(self._estimate(length), length, taken + int(free_memory(self.opened.device) * USABLE))
        self._reserved = length
        if is_loaded:
            self.engine.reserve(length)

    def _estimate(self, length: int) -> Tier:
        return self.opened.estimate(stored_tokens(self.speculation, length))


class DocumentSession:
    """Answer questions about one text, each for itself; the text is read once. `with` frees its memory at the end.

    A question to the LLM about another text in between takes the memory, and the text is then read again.
    """

    def __init__(self, llm: LLM, text: str) -> None:
        self.llm, self.text = llm, text

    def ask(self, question: str, **options: Unpack[AskOptions]) -> Answer:
        """Return the answer to a question about the text, as `LLM.ask`."""
        return self.llm.ask(self.text, question, **options)

    def close(self) -> None:
        """Free the keys and values of the text."""
        self.llm.engine.release()

    def __enter__(self) -> DocumentSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
