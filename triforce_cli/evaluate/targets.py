"""What answers items: the request's model in a mode, or in parts by map-reduce, or another server."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from offload.engine import Engine
from offload.errors import PromptError
from offload.evaluation.tasks.task import Item
from offload.events import Text
from offload.loading.tokenizers.text_stream import TextLayer, stream_text
from offload.settings.config import GenerationConfig, Sampling
from offload.settings.methods import APPROXIMATIONS
from offload.system.machine import default_home

from ..bench.cells import Weights
from ..bench.opened import settings_of_run
from ..bench.quality_modes import ModeEngines, OpenMode
from ..input.documents import Document
from ..output.terminal import Terminal
from ..run.model_request import ModelRequest, Prompt
from ..run.openai_client import NotThere, OpenAIClient
from ..summarize.instructions import AnswerStyle, load_templates
from ..summarize.map_reduce import MapReduce, part_facts
from ..summarize.passages import FinishedParts
from .request import CHATTY, MAP_REDUCE, ids_of

GREEDY = Sampling(temperature=0)


class Target(Protocol):
    """What answers items. `facts` are all that its answers depend on beside the prompt."""

    @property
    def name(self) -> str: ...

    @property
    def facts(self) -> dict[str, Any]: ...

    def answering(self) -> Any:
        """Give, in a `with`, a function that returns an item's answer. That raises TriforceError."""


@dataclass(frozen=True, slots=True)
class ModeTarget:
    """The model in a mode. It continues what the prompt begins, in its chat template if `is_chat`."""

    mode: OpenMode
    engines: ModeEngines
    weights: Weights
    longest: int
    is_chat: bool

    @property
    def name(self) -> str:
        return self.mode.name

    @property
    def facts(self) -> dict[str, Any]:
        mode = self.mode
        own = settings_of_run(mode.model, mode.settings, GREEDY, self.weights, mode.tiers)
        if (approximate := mode.speculation.approximate) is not None:
            own |= {name: getattr(mode.speculation, name) for name in APPROXIMATIONS[approximate].reads}
        return own | {"seed": None, "max_new_tokens": None, "is_chat": self.is_chat}

    @contextmanager
    def answering(self) -> Iterator[Callable[[Item], str]]:
        engine, tokenizer = self.engines.load(self.mode, self.longest), self.mode.model.tokenizer

        def answer(item: Item) -> str:
            ids = ids_of(tokenizer, item, self.is_chat)
            new_tokens = item.new_tokens + (CHATTY if self.is_chat else 0)
            return continued(engine, self.mode, ids, new_tokens, self.is_chat)

        yield answer


@dataclass(frozen=True, slots=True)
class MapReduceTarget:
    """The exact mode, which takes notes on each part of a text and answers from them, as `summarize --map-reduce`."""

    name: str
    exact: ModeTarget
    part: int | None
    opened: ModelRequest
    home: Path | None
    terminal: Terminal

    @property
    def facts(self) -> dict[str, Any]:
        return self.exact.facts | {"part": self.part}

    @contextmanager
    def answering(self) -> Iterator[Callable[[Item], str]]:
        mode = self.exact.mode
        context = min(self.part or self.opened.context, self.opened.context)
        opened = replace(self.opened, model=self.opened.model.with_context(context))
        engine = self.exact.engines.load(mode, self.exact.longest)
        finished = FinishedParts(self.home or default_home(), part_facts(opened), self.terminal.warn)
        reading, style = MapReduce(opened, load_templates(), finished, self.terminal, True), AnswerStyle()

        def noted(prompt: Prompt) -> str:
            text = finished.find(prompt.ids)
            if text is None:
                text = continued(engine, mode, prompt.ids, prompt.new_tokens, True)
                finished.save(prompt.ids, text)
            return text

        def answer(item: Item) -> str:
            try:
                return reduced(item)
            except PromptError as error:  # its hint is for `summarize`
                hint = f"try larger parts, such as {MAP_REDUCE}=2K, or longer texts by --context"
                raise PromptError(error.message, hint) from None

        def reduced(item: Item) -> str:
            document = Document(f"{item.task.name} {item.length}", item.text)
            note_taking, instruction = style.note_taking(item.question), style.instruction(item.question)
            steps = reading.reduce(document, note_taking, instruction, len(opened.encode(item.text)))
            passages = next(steps)
            while True:
                texts = [noted(passage.prompt) for passage in passages]
                try:
                    passages = steps.send(texts)
                except StopIteration as end:
                    return continued(engine, mode, end.value.ids, item.new_tokens + CHATTY, True)

        yield answer


def continued(engine: Engine, mode: OpenMode, ids: list[int], new_tokens: int, is_chat: bool) -> str:
    """Return the text that a greedy run adds to a prompt, without what the model thinks before it."""
    layer = TextLayer.after(mode.model.tokenizer, ids, (), is_chat)
    config = GenerationConfig(max_new_tokens=new_tokens, seed=0)
    events = stream_text(engine.generate(ids, GREEDY, config, mode.speculation), layer)
    return "".join(event.text for event in events if isinstance(event, Text))


@dataclass(slots=True)
class Endpoint:
    """An endpoint by its URL. It continues prompts, and where it only chats it is asked."""

    name: str
    is_chat: bool = False
    _client: OpenAIClient = field(init=False)

    def __post_init__(self) -> None:
        self._client = OpenAIClient(self.name)

    @property
    def facts(self) -> dict[str, Any]:
        """Return what its answers depend on, as far as can be told from here."""
        return {"url": self.name, "model": self._client.model, "is_chat": self.is_chat}

    @contextmanager
    def answering(self) -> Iterator[Callable[[Item], str]]:
        """Give what answers an item. That raises TriforceError."""
        yield self._answer

    def _answer(self, item: Item) -> str:
        body = {"model": self._client.model, "max_tokens": item.new_tokens, "temperature": 0, "seed": 0}
        if not self.is_chat:
            try:
                return self._client.ask("completions", "choices", 0, "text", body=body | {"prompt": item.prompt})
            except NotThere:
                self.is_chat = True
        message = {"role": "user", "content": f"{item.text}\n\n{item.question}"}
        body |= {"messages": [message], "max_tokens": item.new_tokens + CHATTY}
        return self._client.ask("chat/completions", "choices", 0, "message", "content", body=body)
