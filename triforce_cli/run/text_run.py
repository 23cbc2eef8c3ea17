"""One prompt's generation: its metrics, its text, and what is rendered of it."""

from __future__ import annotations

from collections.abc import Generator

from offload.events import Event
from offload.loading.tokenizers.text_stream import TextLayer, stream_text
from offload.metrics import Meter, Summary

from ..output.renderers import Renderer
from .model_request import ModelRequest, Prompt


class TextRun:
    """A generation under way. Each of its events is to be observed once."""

    def __init__(self, opened: ModelRequest, prompt: Prompt, renderer: Renderer) -> None:
        self.prompt = prompt
        self.renderer = renderer
        self.meter = Meter(len(prompt.ids))
        self._layer = text_layer(opened, prompt)

    def text(self, tokens: Generator[Event, int | None]) -> Generator[Event, int | None]:
        """Return the engine's events with text between them, up to a stop string."""
        return stream_text(tokens, self._layer)

    def observe(self, event: Event) -> None:
        """Measure and render an event."""
        self.meter.observe(event)
        self.renderer.event(event)

    @property
    def has_ended(self) -> bool:
        return self.meter.finish_reason is not None

    def flush(self) -> None:
        """Render the text that has been held back, when no more tokens come."""
        for event in self._layer.flush().events():
            self.observe(event)

    def summary(self, **facts: object) -> Summary:
        """Return the metrics with what only the caller knows; of a run that has not ended, as interrupted."""
        return self.meter.summary(self.meter.finish_reason or "interrupted", **facts)


def text_layer(opened: ModelRequest, prompt: Prompt) -> TextLayer:
    """Return what turns the tokens after a prompt into text; with --raw, all text is the answer."""
    stops, is_chat = opened.settings.generation.stop, not opened.request.raw
    return TextLayer.after(opened.model.tokenizer, prompt.ids, stops, is_chat)
