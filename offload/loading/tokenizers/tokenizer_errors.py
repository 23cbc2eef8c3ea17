"""Errors of the tokenizers library as ours."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from ...errors import CheckpointError, TriforceError
from ...short_repr import short_text


@contextmanager
def tokenizer_errors(failure: str) -> Iterator[None]:
    """Raise CheckpointError, with `failure` and the reason, for what goes wrong within.

    The library raises Exception itself. For some damaged files its Rust code panics: that is not even an Exception, and
    would end a thread without a word.
    """
    try:
        yield
    except BaseException as error:
        raise_tokenizer_error(failure, error)


def raise_tokenizer_error(failure: str, error: BaseException) -> NoReturn:
    """Raise what `tokenizer_errors` raises for an error: without the cost of a context, for each token's text."""
    is_others = isinstance(error, Exception) or type(error).__name__ == "PanicException"  # else Ctrl-C
    if isinstance(error, TriforceError) or not is_others:
        raise error
    reason = short_text(str(error)) or type(error).__name__
    raise CheckpointError(f"{failure}: {reason}", "fetch the model again") from error
