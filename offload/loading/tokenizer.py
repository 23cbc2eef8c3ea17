"""Tokens <-> text: prompts in, text out as it becomes final. The engine below knows tokens only."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from typing import Any

from ..errors import PromptError
from ..events import Event, Finished, Text, Tokens

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_MARK = "\ue000{}\ue001"  # private use: stands for a message in a rendered template
_LONGEST_WINDOW = 64  # tokens
_LONGEST_CHARACTER = 4  # bytes in UTF-8, and so at most so many tokens


class Tokenizer:
    """A transformers fast tokenizer, narrowed to what a generation needs."""

    def __init__(self, hf: Any) -> None:
        self._hf = hf

    @property
    def vocabulary(self) -> dict[str, int]:
        """Every token's id."""
        return self._hf.get_vocab()

    @property
    def has_chat_template(self) -> bool:
        return bool(self._hf.chat_template)

    def encode(self, text: str, special_tokens: bool) -> list[int]:
        """Token ids of a text; with `special_tokens` what the model expects around it (BOS), if anything."""
        return self._hf(text, add_special_tokens=special_tokens, verbose=False)["input_ids"]

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Where each token of a plain text begins and ends in it, in characters."""
        found = self._hf(
            text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True, verbose=False
        )
        return found["offset_mapping"]

    def chat(self, user: str, system: str | None) -> list[int]:
        """Token ids of a conversation of one question, ready for the answer. Raises PromptError."""
        if not any(token in text for token in self._control_tokens for text in (user, system or "")):
            return self.encode(self._rendered(user, system), special_tokens=False)  # the template wrote BOS already
        # A document that spells out control tokens must not speak as somebody else: it is encoded apart, as plain text.
        contents = {_MARK.format("user"): user, _MARK.format("system"): system}
        rendered = self._rendered(*(None if text is None else mark for mark, text in contents.items()))
        ids: list[int] = []
        for part in re.split("(" + "|".join(contents) + ")", rendered):
            text = contents.get(part)
            ids += self.encode(part, special_tokens=False) if text is None else self._encode_plainly(text)
        return ids

    @property
    def _control_tokens(self) -> list[str]:
        return [token.content for token in self._hf.added_tokens_decoder.values()]

    def _encode_plainly(self, text: str) -> list[int]:
        """Token ids of a text in which nothing is a control token."""
        return self._hf(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]

    def _rendered(self, user: str, system: str | None) -> str:
        messages = [{"role": "user", "content": user}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        try:
            text = self._hf.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # templates raise what they like
            hint = "leave --system out, or use --raw" if system is not None else "use --raw to go without the template"
            raise PromptError(f"the model's chat template refuses this prompt: {error}", hint) from error
        for message in messages:
            if message["content"].strip() not in text and self._drops(messages, message):
                raise PromptError(f"the model's chat template drops the {message['role']} message", "use --raw")
        return text

    def _drops(self, messages: list[dict], one: dict) -> bool:
        """Whether the rendering is the same with another text in one of the messages."""
        changed = [message | {"content": "something else"} if message is one else message for message in messages]
        texts = [
            self._hf.apply_chat_template(x, add_generation_prompt=True, tokenize=False) for x in (messages, changed)
        ]
        return texts[0] == texts[1]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of some tokens; special tokens are no text."""
        return self._hf.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


class StreamDecoder:
    """Text from tokens one by one: whole characters only, and in constant time a token.

    A tail that decodes to U+FFFD may be the beginning of a character and is held back for as many tokens as a
    character has bytes. Tokens are decoded after a few earlier ones, because some tokenizers treat the first
    word of a text otherwise than the rest.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []  # the window: tokens of the context, then those not wholly emitted
        self._context = 0  # tokens of the window that are context
        self._sent = 0  # characters of the window's text that have been emitted
        self._broken = 0  # tokens at the end that have not made a whole character yet

    def feed(self, token: int) -> str:
        """The text that has become final with this token; often "", never a part of a character."""
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
        """What is left at the end, broken or not."""
        return self._emit(self._decode(self._ids), settled=True) if self._ids else ""

    def _emit(self, text: str, settled: bool) -> str:
        piece = text[self._sent :]
        self._sent = max(self._sent, len(text))
        if settled and piece:
            self._ids = self._ids[self._context :]
        elif len(self._ids) > _LONGEST_WINDOW:  # special tokens or broken bytes without end
            # UTF-8 finds its feet again within a character, so both windows end in the same text, sent and unsent.
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
    """Text on its way out, watched for the stop string that is complete first; it is never let through."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Text that is safe to emit, and whether a stop was met; after that, feed no more."""
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:  # what ends first wins, and of those what begins first: the same however the text was cut into pieces
            safe, self._held = self._held[: min(found)[1]], ""
            return safe, True
        hold = max((self._overlap(stop) for stop in self._stops), default=0)
        cut = len(self._held) - hold
        safe, self._held = self._held[:cut], self._held[cut:]
        return safe, False

    def _overlap(self, stop: str) -> int:
        """Characters at the end of the held text that may be the beginning of `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)

    def flush(self) -> str:
        """What was held back in vain."""
        held, self._held = self._held, ""
        return held


def stream_text(
    events: Generator[Event, int | None], decoder: StreamDecoder, stops: StopStrings
) -> Generator[Event, None]:
    """The engine's events with Text among them; ends at a stop string. Closes the engine's generator in any case.

    A run of tokens is cut behind the one that completes a stop string, and the engine is told how many are kept.
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
    """How many tokens of a run there are up to a stop string, the text that became final, and whether there was one."""
    text = ""
    for used, token in enumerate(ids, 1):
        safe, met = stops.feed(decoder.feed(token))
        text += safe
        if met:
            return used, text, True
    return len(ids), text, False


def held_text(decoder: StreamDecoder, stops: StopStrings) -> tuple[str, bool]:
    """What both hold back when no more tokens come, and whether that met a stop string."""
    safe, met = stops.feed(decoder.flush())
    return (safe if met else safe + stops.flush()), met


def _text(text: str) -> Iterator[Text]:
    if text:
        yield Text(text)
