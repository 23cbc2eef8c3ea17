"""The generation for one prompt, under way: its events are measured and rendered."""

from collections.abc import Generator, Hashable, Sequence
from dataclasses import replace
from typing import Any

from offload.batching.request import BatchRequest
from offload.constraints.quotes import Quotation, quotations
from offload.engine import Engine
from offload.events import Event
from offload.loading.tokenizers.text_stream import TextLayer, TextPieces, stream_text
from offload.metrics import Meter
from offload.settings.config import GenerationConfig
from offload.settings.constraint import QUOTE

from ..output.renderers import Renderer
from .opened_request import OpenedRequest, Prompt


class Generation:
    """The generation for a prompt. Each of its events is to be observed once."""

    def __init__(self, opened: OpenedRequest, prompt: Prompt, renderer: Renderer) -> None:
        self.opened, self.prompt, self.renderer = opened, prompt, renderer
        self.meter = Meter(len(prompt.ids))

    @property
    def config(self) -> GenerationConfig:
        """The generation's settings for the prompt."""
        return replace(self.opened.settings.generation, max_new_tokens=self.prompt.new_tokens)

    @property
    def has_ended(self) -> bool:
        return self.meter.finish_reason is not None

    def events(self, engine: Engine) -> Generator[Event, int | None]:
        """Return the engine's events for the prompt, without text."""
        return engine.generate(self.prompt.ids, self.opened.sampling, self.config, self.opened.settings.speculation)

    def text(self, tokens: Generator[Event, int | None]) -> Generator[Event, int | None]:
        """Return the engine's events with text between them, up to a stop string."""
        return stream_text(tokens, self._layer())

    def batch_request(self, key: Hashable) -> BatchRequest:
        opened = self.opened
        return BatchRequest(key, self.prompt.ids, opened.sampling, self.config, opened.settings.speculation, self.text)

    def observe(self, event: Event) -> None:
        """Measure and render an event."""
        self.meter.observe(event)
        self.renderer.event(event)

    def flush(self) -> None:
        """Render the text that is left of all measured tokens, when no more come.

        They are decoded anew: Ctrl-C may have come between tokens and their text, which are then nowhere else.
        """
        layer, meter = self._layer(), self.meter
        _, fed = layer.feed(meter.ids)
        left = TextPieces("", "", True) if fed.met else layer.flush()
        thought = (fed.thought + left.thought)[len("".join(meter.thoughts)) :]
        text = (fed.text + left.text)[len(meter.text) :]
        for event in TextPieces(thought, text, True, fed.thought_tokens - meter.thinking_tokens).events():
            self.observe(event)

    def summary_fields(self) -> dict[str, Any]:
        """Return the fields of the summary that the meter does not know, with the quotations of the text so far."""
        fields = self.opened.summary_facts(self.prompt.new_tokens)
        constraint = self.opened.sampling.constraint
        if constraint is not None and constraint.kind == QUOTE:
            parts = self.opened.request.parts
            quotes = quotations(self.meter.text, constraint.text)
            fields["quotes"] = [quotation_fields(quote, parts) for quote in quotes]
        return fields

    def _layer(self) -> TextLayer:
        # With --raw, nothing is thought: all text is the answer.
        stops = self.opened.settings.generation.stop
        return TextLayer.after(self.opened.model.tokenizer, self.prompt.ids, stops, not self.opened.request.raw)


def quotation_fields(quotation: Quotation, parts: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """Return a quotation's fields; of several files, the name of the one that has it, and the place in that."""
    place = quotation._asdict()
    if len(parts) < 2 or quotation.start < 0:
        return place
    name, begin = [part for part in parts if part[1] <= quotation.start][-1]
    return place | {"start": quotation.start - begin, "end": quotation.end - begin, "document": name}
