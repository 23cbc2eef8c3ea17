"""Errors of the tokenizers library as ours, and the reading of JSON files of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import CheckpointError, TriforceError
from ...short_repr import short_text


def read_json(path: Path) -> dict:
    """Read a JSON object from a file of a checkpoint; {} if there is no such file. Raises CheckpointError."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {short_text(str(error))}", "fetch the model again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object", "fetch the model again")
    return value


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
