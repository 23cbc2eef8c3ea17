"""Encodes prompts and decodes tokens to text as it becomes final. The engine below works on tokens only."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from ..errors import PromptError
from ..events import Event, Finished, Text, Tokens
from .chat_template import ChatTemplate

if TYPE_CHECKING:
    import tokenizers

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_MARK = "\ue000{}\ue001"  # private-use characters: a placeholder for a message in a rendered template
_LONGEST_WINDOW = 64  # tokens
_LONGEST_CHARACTER = 4  # bytes in UTF-8, so at most as many tokens


class Tokenizer:
    """Encodes and decodes text, and renders the model's chat template, with the results of transformers' tokenizers.

    Args:
        backend: a `tokenizers.Tokenizer`, as transformers would configure it.
        chat_template: a Jinja template, or several by name; None for none.
        special_tokens: the model's special tokens by transformers' names, such as `bos_token`.
        splits_special_tokens: whether control tokens in a text are encoded as plain text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        chat_template: str | Mapping[str, str] | None,
        special_tokens: Mapping[str, str],
        splits_special_tokens: bool = False,
    ) -> None:
        self._backend = backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self._template = ChatTemplate(chat_template, special_tokens) if chat_template else None
        self._splits_special_tokens = splits_special_tokens

    @classmethod
    def from_transformers(cls, hf: Any) -> Tokenizer:
        """Return a tokenizer with the configuration of transformers' fast tokenizer."""
        return cls(hf.backend_tokenizer, hf.chat_template, hf.special_tokens_map, hf.split_special_tokens)

    @property
    def vocabulary(self) -> dict[str, int]:
        """Return every token's id."""
        return self._backend.get_vocab(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        """Return whether the model has a chat template."""
        return self._template is not None

    def encode(self, text: str, special_tokens: bool) -> list[int]:
        """Return the token ids of a text; with `special_tokens`, also those around it, such as BOS."""
        return self._encode(text, special_tokens, self._splits_special_tokens).ids

    def _encode(self, text: str, special_tokens: bool, splits_special_tokens: bool) -> tokenizers.Encoding:
        self._backend.encode_special_tokens = splits_special_tokens
        return self._backend.encode(text, add_special_tokens=special_tokens)

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return the start and end of each token in a plain text, in characters."""
        return self._encode(text, special_tokens=False, splits_special_tokens=True).offsets

    def chat(self, user: str, system: str | None) -> list[int]:
        """Return the token ids of one user message in the chat template, up to the answer. Raises PromptError."""
        if not any(token in text for token in self._control_tokens for text in (user, system or "")):
            return self.encode(self._rendered(user, system), special_tokens=False)  # the template wrote BOS already
        # A document that contains control tokens as text must not act as another role: encode it apart, as plain text.
        contents = {_MARK.format("user"): user, _MARK.format("system"): system}
        rendered = self._rendered(*(None if text is None else mark for mark, text in contents.items()))
        ids: list[int] = []
        for part in re.split("(" + "|".join(contents) + ")", rendered):
            text = contents.get(part)
            ids += self.encode(part, special_tokens=False) if text is None else self._encode_plainly(text)
        return ids

    @property
    def _control_tokens(self) -> list[str]:
        return [token.content for token in self._backend.get_added_tokens_decoder().values()]

    def _encode_plainly(self, text: str) -> list[int]:
        """Return the token ids of a text in which control tokens are encoded as plain text."""
        return self._encode(text, special_tokens=False, splits_special_tokens=True).ids

    def _rendered(self, user: str, system: str | None) -> str:
        """Render the chat template. Raises PromptError if it fails or drops a message."""
        messages = [{"role": "user", "content": user}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        try:
            text = self._template.render(messages)
        except Exception as error:  # templates raise any type
            hint = "leave --system out, or use --raw" if system is not None else "use --raw to go without the template"
            raise PromptError(f"the model's chat template refuses this prompt: {error}", hint) from error
        for message in messages:
            if message["content"].strip() not in text and self._drops(messages, message):
                raise PromptError(f"the model's chat template drops the {message['role']} message", "use --raw")
        return text

    def _drops(self, messages: list[dict], one: dict) -> bool:
        """Return whether the rendering stays the same when the content of one message changes."""
        changed = [message | {"content": "something else"} if message is one else message for message in messages]
        return self._template.render(messages) == self._template.render(changed)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some tokens, without special tokens."""
        return self._backend.decode(list(ids), skip_special_tokens=True)


class StreamDecoder:
    """Decodes tokens one by one, in constant time a token, and emits whole characters only.

    A tail that decodes to U+FFFD may be the beginning of a character. It is held back for at most as many tokens as a
    character has bytes. Tokens are decoded together with a few earlier ones, because some tokenizers treat the first
    word of a text differently.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []  # the window: context tokens, then those not completely emitted
        self._context = 0  # number of context tokens in the window
        self._sent = 0  # characters of the window's text that have been emitted
        self._broken = 0  # tokens at the end that do not form a whole character yet

    def feed(self, token: int) -> str:
        """Return the text that became final with this token; often "", never a part of a character."""
        self._ids.append(token)
        text = self._decode(self._ids)
        if not text.endswith(_INCOMPLETE):
            self._broken = 0
            return self._emit(text, settled=True)
        self._broken += 1
        if self._broken < _LONGEST_CHARACTER:
            return ""
        return self._emit(text[:-1], settled=False)  # broken bytes; only the last may still grow into a character

    def flush(self) -> str:
        """Return the remaining text at the end, complete or not."""
        return self._emit(self._decode(self._ids), settled=True) if self._ids else ""

    def _emit(self, text: str, settled: bool) -> str:
        """Return the part of the window's text that was not emitted yet, and shorten the window."""
        piece = text[self._sent :]
        self._sent = max(self._sent, len(text))
        if settled and piece:
            self._ids = self._ids[self._context :]
        elif len(self._ids) > _LONGEST_WINDOW:  # a long run of special tokens or broken bytes
            # UTF-8 resynchronises within one character, so both windows end in the same text, sent and unsent.
            unsent = len(text) + (not settled) - self._sent
            self._ids, self._context = self._ids[-_LONGEST_WINDOW // 2 :], 0
            self._sent = len(self._decode(self._ids)) - unsent
            return piece
        else:
            return piece
        self._context = len(self._ids)
        self._sent = len(self._decode(self._ids))
        return piece


class StopStrings:
    """Searches streamed text for stop strings. The stop string that is complete first ends it and is not emitted."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._pending = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Return the text that is safe to emit, and whether a stop string was found; after that, feed no more."""
        self._pending += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._pending.find(stop)) >= 0]
        if found:  # the earliest end wins, then the earliest start: independent of how the text was cut into pieces
            safe, self._pending = self._pending[: min(found)[1]], ""
            return safe, True
        hold = max((self._overlap(stop) for stop in self._stops), default=0)
        cut = len(self._pending) - hold
        safe, self._pending = self._pending[:cut], self._pending[cut:]
        return safe, False

    def _overlap(self, stop: str) -> int:
        """Return how many characters at the end of the pending text may be the beginning of `stop`."""
        longest = min(len(stop) - 1, len(self._pending))
        return next((n for n in range(longest, 0, -1) if self._pending.endswith(stop[:n])), 0)

    def flush(self) -> str:
        """Return the pending text at the end; it turned out not to be a stop string."""
        pending, self._pending = self._pending, ""
        return pending


def stream_text(
    events: Generator[Event, int | None], decoder: StreamDecoder, stops: StopStrings
) -> Generator[Event, None]:
    """Yield the engine's events and Text events in between, up to a stop string. Always closes the engine's generator.

    A run of tokens is cut after the one that completes a stop string, and the number of kept tokens is sent to the
    engine.
    """
    kept = 0
    with closing(events):
        for event in events:
            if isinstance(event, Finished):
                text, met = held_text(decoder, stops)
                yield from _text(text)
                yield Finished("stop") if met else event
                return
            if not isinstance(event, Tokens):
                yield event
                continue
            used, text, met = _until_stop(event.ids, decoder, stops)
            kept += used
            yield Tokens(event.ids[:used])
            yield from _text(text)
            if met:
                yield events.send(kept)
                return


def _until_stop(ids: Sequence[int], decoder: StreamDecoder, stops: StopStrings) -> tuple[int, str, bool]:
    """Return the number of tokens up to a stop string, the text that became final, and whether one was found."""
    text = ""
    for used, token in enumerate(ids, 1):
        safe, met = stops.feed(decoder.feed(token))
        text += safe
        if met:
            return used, text, True
    return len(ids), text, False


def held_text(decoder: StreamDecoder, stops: StopStrings) -> tuple[str, bool]:
    """Return the pending text of both when no more tokens come, and whether it contained a stop string."""
    safe, met = stops.feed(decoder.flush())
    return (safe if met else safe + stops.flush()), met


def _text(text: str) -> Iterator[Text]:
    if text:
        yield Text(text)
