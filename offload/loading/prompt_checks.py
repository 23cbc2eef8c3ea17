"""Checks of a request's text and token ids against the model and its context."""

from collections.abc import Iterable, Sequence

from ..architecture.config import ModelShape
from ..architecture.yarn import stretch_error
from ..errors import PromptError
from ..short_repr import short_repr
from ..units import counted

_IDS_HINT = "give a list of whole numbers, as the tokenizer's encode returns"


def check_text(text: object, name: str = "the text") -> None:
    """Raise PromptError unless a text is a str that UTF-8 can encode."""
    if not isinstance(text, str):
        hint = "give a str; Engine.generate takes token ids, and bytes must be decoded"
        raise PromptError(f"{name} is {short_repr(text)}, of type {type(text).__name__}", hint)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"{name} has half a surrogate pair, U+{ord(text[error.start]):04X}, at position {error.start:,}"
        raise PromptError(half, "decode its bytes with errors='replace'") from None


def token_ids(ids: Iterable[int]) -> list[int]:
    """Return token ids as a list of ints, from any integers or a tensor or array with one axis. Raises PromptError."""
    if isinstance(ids, (str, bytes)) or not (hasattr(ids, "tolist") or isinstance(ids, Iterable)):
        raise PromptError(f"{short_repr(ids)}, of type {type(ids).__name__}, are no token ids", _IDS_HINT)
    result = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if set(map(type, result)) <= {int}:
        return result  # a million tokens are checked ten times as fast so
    for position, token in enumerate(result):
        if type(token) is not int:
            if isinstance(token, bool) or not hasattr(token, "__index__"):
                wrong = f"{short_repr(token)} at position {position:,} is not a token id"
                raise PromptError(wrong, _IDS_HINT)
            result[position] = int(token)
    return result


def check_prompt(shape: ModelShape, ids: Sequence[int], length: int) -> None:
    """Raise PromptError for no ids, ids outside the vocabulary, or a `length` of more tokens than the context."""
    if not ids:
        raise PromptError("the prompt is empty", "give at least one token")
    check_vocabulary(shape, ids)
    if length > shape.context:
        raise PromptError(
            f"{length:,} tokens, prompt and answer, exceed the model's context of {shape.context:,}",
            "shorten the prompt, ask for fewer new tokens, or stretch the context (OpenModel.stretched)",
        )


def check_vocabulary(shape: ModelShape, ids: Sequence[int]) -> None:
    """Raise PromptError for an id that the model does not have."""
    vocab = shape.vocab
    for wrong in {min(ids, default=0), max(ids, default=0)}:
        if not 0 <= wrong < vocab:
            raise PromptError(
                f"token id {wrong:,} at position {ids.index(wrong):,} is not in the vocabulary of {vocab:,} tokens",
                "encode the text with this model's tokenizer",
            )


def new_tokens_in_context(shape: ModelShape, prompt_tokens: int, wanted: int, exact: bool) -> int:
    """Return how many tokens may follow the prompt: `wanted`, or unless `exact` what fits into the context.

    Raises PromptError with the numbers if the prompt exceeds the context, or with `exact` prompt and answer do.
    """
    context = shape.context
    limit = f"the model's context of {counted(context, 'token')}"
    if shape.sliding_window == context:
        limit += " (its sliding window)"
    extend = "--extend-context, " if stretch_error(shape) is None else ""
    if prompt_tokens >= context:
        raise PromptError(
            f"the prompt has {counted(prompt_tokens, 'token')}, which leaves no room in {limit}",
            f"use `triforce summarize`, which reads it in parts, {extend}or --model with a longer context",
        )
    if exact and prompt_tokens + wanted > context:
        raise PromptError(
            f"{counted(prompt_tokens, 'prompt token')} and {counted(wanted, 'new one')} exceed {limit}",
            f"use --max-new-tokens {context - prompt_tokens} or fewer, {extend}or shorten the prompt",
        )
    return min(wanted, context - prompt_tokens)
