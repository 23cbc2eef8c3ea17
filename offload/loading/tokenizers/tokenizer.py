"""Encodes prompts and decodes tokens. The engine below works on tokens only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from ...errors import CheckpointError, PromptError, TriforceError
from ...short_repr import short_text
from ..prompt_checks import check_text, token_ids
from .chat_template import ASSISTANT, SYSTEM, USER, ChatMessage, ChatTemplate, encode_conversation
from .control_tokens import ControlTokens
from .text_pieces import PIECE, can_cut, pieces
from .thinking import Thinking, thinking_format
from .token_bytes import TokenBytes
from .tool_calls import ToolFormat, tool_format

if TYPE_CHECKING:
    import tokenizers

EncodingProgress = Callable[[int, int], None]  # characters that are encoded, and all of them
Encoded = dict[tuple[str, bool], list[int]]  # the ids of texts of a conversation

_SENTINEL = "\x02"  # stands before a part of a prompt
_LONGEST_OPENING = 8  # tokens, at most, of <think> and what follows it at a prompt's end


@contextmanager
def tokenizer_errors(failure: str) -> Iterator[None]:
    """Raise CheckpointError, with `failure` and the reason, for what goes wrong within.

    The tokenizers library raises Exception itself, and for some damaged files its Rust code panics: that is not even an
    Exception, and would end a thread without a word.
    """
    try:
        yield
    except TriforceError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # Ctrl-C
        reason = short_text(str(error)) or type(error).__name__
        raise CheckpointError(f"{failure}: {reason}", "fetch the model again") from error


class Tokenizer:
    """Encode and decode text, and render the model's chat template, with the results of transformers' tokenizers.

    Several threads may use it at once.

    Args:
        backend: a `tokenizers.Tokenizer`.
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
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = splits_special_tokens
        self._backend, self._control = backend, ControlTokens(backend, splits_special_tokens)
        self._template = ChatTemplate(chat_template, special_tokens) if chat_template else None

    @classmethod
    def from_transformers(cls, hf: Any) -> Tokenizer:
        """Return a tokenizer with the configuration of transformers' fast tokenizer."""
        return cls(hf.backend_tokenizer, hf.chat_template, hf.special_tokens_map, hf.split_special_tokens)

    @property
    def vocabulary(self) -> dict[str, int]:
        """Return every token's id."""
        return self._backend.get_vocab(with_added_tokens=True)

    @property
    def special_ids(self) -> dict[str, int]:
        """Return the ids of special tokens, which are no text, by their names."""
        added = self._backend.get_added_tokens_decoder().items()
        return {each.content: token for token, each in added if each.special}

    def encode(self, text: str, special_tokens: bool = True, progress: EncodingProgress | None = None) -> list[int]:
        """Return the token ids of a text; with `special_tokens`, also those around it, such as BOS.

        A long text is encoded piece by piece where that gives the same ids; `progress` is called after each piece, with
        the characters done and all of them. Raises PromptError for what is not text.
        """
        check_text(text)
        if len(text) <= PIECE or not self._can_cut:
            return self._encode(self._backend, text, special_tokens).ids
        before, after = self._around if special_tokens else ([], [])
        return [*before, *self._inner_ids(text, progress), *after]

    def _inner_ids(self, text: str, progress: EncodingProgress | None) -> list[int]:
        """Return the ids of a text, perhaps with escaped control tokens, without special tokens around it."""
        if not self._control.has_escaped(text):
            return [token for _, piece in self._pieces(self._backend, text, progress) for token in piece.ids]
        named, ids = self._control.named(text), self._control.ids
        pieces = self._pieces(self._control.backend, named, progress)
        return [ids.get(token, token) for _, piece in pieces for token in piece.ids]

    def _part_ids(self, text: str, is_start: bool, progress: EncodingProgress | None) -> list[int]:
        """Return the ids of a part of a prompt; a tokenizer may put a blank before a text, but not within one."""
        if not is_start and text and self._adds_blank:
            before = self._inner_ids(_SENTINEL, None)
            ids = self._inner_ids(_SENTINEL + text, progress)
            if ids[: len(before)] == before:
                return ids[len(before) :]
        return self._inner_ids(text, progress)

    @cached_property
    def _adds_blank(self) -> bool:
        return any(token.startswith("▁") for token in self._encode(self._control.backend, "a").tokens)

    def _pieces(
        self, backend: tokenizers.Tokenizer, text: str, progress: EncodingProgress | None
    ) -> Iterator[tuple[int, tokenizers.Encoding]]:
        """Yield the tokens of each piece of a text, and where it begins; of all of it where it cannot be cut."""
        done = 0
        for piece in pieces(text, PIECE) if self._can_cut else [text]:
            yield done, self._encode(backend, piece)
            done += len(piece)
            if progress is not None and len(text) > PIECE:
                progress(done, len(text))

    @cached_property
    def _can_cut(self) -> bool:
        return can_cut(self._backend)

    @property
    def _around(self) -> tuple[list[int], list[int]]:
        """Return the special tokens before and after a text."""
        whole = self._encode(self._backend, "a", special_tokens=True)
        first = whole.special_tokens_mask.index(0)
        return whole.ids[:first], whole.ids[first + whole.special_tokens_mask.count(0) :]

    @staticmethod
    def _encode(backend: tokenizers.Tokenizer, text: str, special_tokens: bool = False) -> tokenizers.Encoding:
        with tokenizer_errors("the model's tokenizer fails on this text"):
            return backend.encode(text, add_special_tokens=special_tokens)

    def spans(self, text: str, progress: EncodingProgress | None = None) -> list[tuple[int, int]]:
        """Return the start and end of each token in a plain text, in characters; `progress` is as of `encode`."""
        found: list[tuple[int, int]] = []
        for begin, piece in self._pieces(self._control.backend, text, progress):
            found += [(begin + start, begin + end) for start, end in piece.offsets]
        return found

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template. Raises PromptError if it has none."""
        if self._template is None:
            raise PromptError("this model has no chat template", "encode the text itself: Tokenizer.encode")
        return self._template

    def chat(
        self, user: str, system: str | None, progress: EncodingProgress | None = None, think: bool | None = None
    ) -> list[int]:
        """Return the token ids of one user message in the chat template, up to the answer, as `chat_turns`."""
        messages = [] if system is None else [ChatMessage(SYSTEM, system)]
        return self.chat_turns([*messages, ChatMessage(USER, user)], progress, think=think)

    def chat_turns(
        self,
        messages: Sequence[ChatMessage],
        progress: EncodingProgress | None = None,
        known: Encoded | None = None,
        think: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of messages in the chat template, up to the next answer, as `encode_conversation`.

        Control tokens that a message spells out are text, so that a document cannot act as another role.

        Args:
            known: remembers the ids of long texts for the next call, which need not encode a document again.
            think: switches thinking on or off; None leaves it to the template.
            tools: those that the answer may call, as in OpenAI's API.
            variables: further variables of the template.

        Raises PromptError if the template refuses the messages, or has no switch for thinking.
        """
        template = self.chat_template
        for message in messages:
            check_text(message.content, f"the {message.role} message")
        switched = {}
        if think is not None:
            option = f"--think {'on' if think else 'off'}"
            if template.switch is None:
                raise PromptError(f"{option}: this model's chat template has no switch for thinking", "leave it out")
            switched[template.switch] = think
        earlier = dict(known or {})
        remembered = {} if known is None else known
        remembered.clear()

        def encode(text: str, is_start: bool) -> list[int]:
            key = text, is_start
            if key not in remembered:
                ids = earlier.get(key)
                remembered[key] = self._part_ids(*key, progress) if ids is None else ids
            return remembered[key]

        form = thinking_format(template.text())
        own = (form.opening, form.closing) if form else ()  # templates look for them in earlier answers
        escaped = [
            replace(
                message,
                content=self._control.escape(message.content, own if message.role == ASSISTANT else ()),
                more=self._control.escape(message.more),
            )
            for message in messages
        ]
        values = {"tools": self._control.escape(tools), "variables": {**(variables or {}), **switched}}
        return encode_conversation(escaped, partial(template.render, **values), encode)

    @cached_property
    def tool_format(self) -> ToolFormat:
        """How the model writes calls of tools. Raises PromptError if its chat template has none that is known."""
        return tool_format(self.chat_template)

    def thinking(self, ids: Sequence[int]) -> Thinking | None:
        """Return what separates thinking from the answer after a prompt of the chat template; None: it never thinks."""
        form = None if self._template is None else thinking_format(self._template.text())
        if form is None:
            return None
        end = self._backend.decode(list(ids[-_LONGEST_OPENING:]), skip_special_tokens=False)
        return Thinking(form, end.rstrip().endswith(form.opening + form.label))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens. Raises PromptError for what are no ids.

        Tokens may end within a character: the text of a few of many tokens may begin and end with U+FFFD. Stream text
        with `LLM.ask`, or with `offload.loading.tokenizers.text_stream`.
        """
        return self._backend.decode(token_ids(ids), skip_special_tokens=True)

    def decoder(self, marks: Sequence[str]) -> Callable[[list[int]], str]:
        """Return `decode`, but with the special tokens `marks` as they are, and for the model's own tokens alone."""
        if not marks:
            return partial(self._backend.decode, skip_special_tokens=True)
        hidden = {token for name, token in self.special_ids.items() if name not in marks}
        return lambda ids: self._backend.decode([i for i in ids if i not in hidden], skip_special_tokens=False)

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """What returns the bytes of a token; other threads may use it while this one decodes."""
        return TokenBytes(self._backend)
