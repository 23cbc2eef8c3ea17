"""Encodes prompts and decodes tokens. The engine below works on tokens only."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from ...errors import CheckpointError, PromptError
from ...system.daemon_threads import interruptible
from ..prompt_checks import check_text, token_ids
from .conversation import ChatMessage, ChatTemplate, encode_conversation
from .text_pieces import PIECE, TokenBytes, can_cut, pieces
from .thinking import CHANNEL, CLOSING, OPENING, Harmony, Thinking
from .tokenizer_errors import raise_tokenizer_error, tokenizer_errors
from .tool_calls import ToolFormat, tool_format

if TYPE_CHECKING:
    import tokenizers

EncodingProgress = Callable[[int, int], None]  # characters that are encoded, and all of them

_MARK = "\ue000{}\ue001"  # private-use characters: a placeholder for a message in a rendered template
_MARKUP = re.compile(r"<.*>|\[.*\]", re.DOTALL).fullmatch  # an added token that is no text
_LARGEST_ID = 2**24  # of any token; real vocabularies have up to 2**18
_LONGEST_OPENING = 8  # tokens, at most, of <think> and what follows it at a prompt's end


class Tokenizer:
    """Encode and decode text, and render the model's chat template, with the results of transformers' tokenizers.

    Several threads may use it at once.

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
        self._lock = threading.Lock()  # a backend has state while it encodes

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
        return self._template is not None

    @property
    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            raise PromptError("this model has no chat template", "encode the text itself: Tokenizer.encode")
        return self._template

    def encode(self, text: str, special_tokens: bool = True, progress: EncodingProgress | None = None) -> list[int]:
        """Return the token ids of a text; with `special_tokens`, also those around it, such as BOS.

        A long text is encoded piece by piece where that gives the same ids; `progress` is called after each piece, with
        the characters done and all of them. Raises PromptError for what is no text.
        """
        check_text(text)
        return self._ids(text, special_tokens, False, progress)

    def _ids(self, text: str, special_tokens: bool, is_plain: bool, progress: EncodingProgress | None) -> list[int]:
        if len(text) <= PIECE or not self._can_cut:
            return self._encode(text, special_tokens, is_plain).ids
        before, after = self._around if special_tokens else ([], [])
        return [*before, *chain.from_iterable(piece.ids for _, piece in self._pieces(text, is_plain, progress)), *after]

    def _pieces(
        self, text: str, is_plain: bool, progress: EncodingProgress | None
    ) -> Iterator[tuple[int, tokenizers.Encoding]]:
        """Yield the tokens of each piece of a text, and where it begins; of all of it where it cannot be cut."""
        done = 0
        for piece in pieces(text, PIECE) if self._can_cut else [text]:
            yield done, self._encode(piece, False, is_plain)
            done += len(piece)
            if progress is not None and len(text) > PIECE:
                progress(done, len(text))

    @cached_property
    def _can_cut(self) -> bool:
        return can_cut(self._backend)

    @property
    def _around(self) -> tuple[list[int], list[int]]:
        """Return the special tokens before and after a text."""
        whole = self._encode("a", special_tokens=True, is_plain=True)
        first = whole.special_tokens_mask.index(0)
        return whole.ids[:first], whole.ids[first + whole.special_tokens_mask.count(0) :]

    def _encode(self, text: str, special_tokens: bool, is_plain: bool) -> tokenizers.Encoding:
        """Return a text's tokens; in a plain one, control tokens that are spelt out are text."""
        backend = self._plain_backend if is_plain else self._backend
        with self._lock, tokenizer_errors("the model's tokenizer fails on this text"):
            backend.encode_special_tokens = is_plain or self._splits_special_tokens
            if len(text) <= PIECE:
                return backend.encode(text, add_special_tokens=special_tokens)
            # A batch, unlike a text, is encoded without the interpreter's lock.
            return interruptible(lambda: backend.encode_batch([text], add_special_tokens=special_tokens)[0])

    @cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        """The backend for texts whose control tokens are plain text: all of them are special in it.

        Added tokens such as <think> act on the model like special ones, but many tokenizers do not call them special,
        and then `encode_special_tokens` does not split them. Others, such as runs of spaces, stay tokens.
        """
        if (largest := max(self.vocabulary.values(), default=0)) > _LARGEST_ID:
            raise CheckpointError(f"the model's tokenizer has a token {largest:,}", "fetch the model again")
        state = json.loads(self._backend.to_str())  # takes a time that grows with the largest id
        ordinary = [token for token in state["added_tokens"] if not token["special"] and _MARKUP(token["content"])]
        if not ordinary:
            return self._backend
        for token in ordinary:
            token["special"] = True
        return type(self._backend).from_str(json.dumps(state))

    def spans(self, text: str, progress: EncodingProgress | None = None) -> list[tuple[int, int]]:
        """Return the start and end of each token in a plain text, in characters; `progress` is as of `encode`."""
        found: list[tuple[int, int]] = []
        for begin, piece in self._pieces(text, True, progress):
            found += [(begin + start, begin + end) for start, end in piece.offsets]
        return found

    def chat(
        self, user: str, system: str | None, progress: EncodingProgress | None = None, think: bool | None = None
    ) -> list[int]:
        """Return the token ids of one user message in the chat template, up to the answer.

        `think` switches thinking on or off; None leaves it to the template. `progress` as of `encode`, for each part
        of a prompt with control tokens anew.

        Raises:
            PromptError: the template refuses the messages, or has no switch for thinking.
        """
        check_text(user, "the user message")
        if system is not None:
            check_text(system, "the system message")
        self._check_switch(think)
        if not any(token in text for token in self._control_tokens for text in (user, system or "")):
            return self.encode(self._rendered(user, system, think), False, progress)  # the template wrote BOS already
        # A document that contains control tokens as text must not act as another role: encode it apart, as plain text.
        user_mark, system_mark = _MARK.format("user"), _MARK.format("system")
        contents = {user_mark: user} if system is None else {user_mark: user, system_mark: system}
        rendered = self._rendered(user_mark, None if system is None else system_mark, think)
        ids: list[int] = []
        for part in re.split("(" + "|".join(contents) + ")", rendered):
            ids += self._ids(contents.get(part, part), False, part in contents, progress)
        return ids

    def chat_turns(
        self,
        messages: Sequence[ChatMessage],
        progress: EncodingProgress | None = None,
        known: dict[tuple[str, bool], list[int]] | None = None,
        think: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Return the token ids of messages in the chat template, up to the next answer, as `encode_conversation`.

        `tools` may be called by the answer, as in OpenAI's API.
        One user message, after a system message or not, has the ids that `chat` returns; `think` is as there. `known`
        remembers the ids of long texts for the next call, which need not encode a document again. Raises PromptError.
        """
        for message in messages:
            check_text(message.content, f"the {message.role} message")
        self._check_switch(think)
        earlier = dict(known or {})
        remembered = {} if known is None else known
        remembered.clear()

        def encode(text: str, is_plain: bool) -> list[int]:
            key = text, is_plain
            if key not in remembered:
                found = earlier.get(key)
                remembered[key] = self._ids(text, False, is_plain, progress) if found is None else found
            return remembered[key]

        render = partial(self._chat_template.render, think=think, tools=tools)
        return encode_conversation(messages, render, encode, self._control_tokens)

    @property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes calls of tools; None if its chat template has none that is known."""
        return None if self._template is None else tool_format(self._template.text_of(with_tools=True))

    def _check_switch(self, think: bool | None) -> None:
        """Raise PromptError if thinking is to be switched on or off, and the template has no switch for it."""
        if think is not None and not self._chat_template.has_switch:
            raise PromptError(
                f"--think {'on' if think else 'off'}: this model's chat template has no switch for thinking",
                "leave --think out",
            )

    @property
    def _control_tokens(self) -> list[str]:
        return [token.content for token in self._backend.get_added_tokens_decoder().values()]

    @property
    def special_ids(self) -> dict[str, int]:
        """Return the ids of special tokens, which are no text, by their names."""
        added = self._backend.get_added_tokens_decoder().items()
        return {each.content: token for token, each in added if each.special}

    def thinking(self, ids: Sequence[int]) -> Thinking | Harmony | None:
        """Return what separates thinking from the answer after a prompt of the chat template; None: it never thinks."""
        if self._template is not None and CHANNEL in self._template.text:
            return Harmony()
        if self._template is None or not any(mark in self._template.text for mark in (OPENING, CLOSING)):
            return None
        end = self._decode(list(ids[-_LONGEST_OPENING:]), skip_special_tokens=False)
        return Thinking(is_open=end.rstrip().endswith(OPENING))

    def _rendered(self, user: str, system: str | None, think: bool | None) -> str:
        """Render the chat template. Raises PromptError if it fails or drops a message."""
        messages = [{"role": "user", "content": user}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        template = self._chat_template
        try:
            text = template.render(messages, think)
        except Exception as error:  # templates raise any type
            hint = "leave --system out, or use --raw" if system is not None else "use --raw to go without the template"
            raise PromptError(f"the model's chat template refuses this prompt: {error}", hint) from error
        for message in messages:
            if message["content"].strip() not in text and self._drops(messages, message, think):
                raise PromptError(f"the model's chat template drops the {message['role']} message", "use --raw")
        return text

    def _drops(self, messages: list[dict[str, str]], one: dict[str, str], think: bool | None) -> bool:
        """Return whether the rendering stays the same when the content of one message changes."""
        changed = [message | {"content": "something else"} if message is one else message for message in messages]
        render = self._chat_template.render
        return render(messages, think) == render(changed, think)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens. Raises PromptError for what are no ids.

        Tokens may end within a character: the text of a few of many tokens may begin and end with U+FFFD. Stream text
        with `LLM.ask`, or with `offload.loading.tokenizers.text_stream`.
        """
        return self._decode(token_ids(ids), skip_special_tokens=True)

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        try:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            raise_tokenizer_error("the model's tokenizer fails on its own tokens", error)

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """What returns the bytes of a token; other threads may use it while this one decodes."""
        return TokenBytes(self._backend)

    def decoder(self, marks: Sequence[str]) -> Callable[[list[int]], str]:
        """Return `decode`, but with the special tokens `marks` as they are, and for the model's own tokens alone."""
        if not marks:
            return partial(self._decode, skip_special_tokens=True)
        added = self._backend.get_added_tokens_decoder().items()
        hidden = {token for token, each in added if each.special and each.content not in marks}
        return lambda ids: self._decode([i for i in ids if i not in hidden], skip_special_tokens=False)
