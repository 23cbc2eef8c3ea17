"""Errors of the tokenizers library as ours."""

from collections.abc import Iterator
from contextlib import contextmanager

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
    except TriforceError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # Ctrl-C
        reason = short_text(str(error)) or type(error).__name__
        raise CheckpointError(f"{failure}: {reason}", "fetch the model again") from error
