"""Reads the JSON files of a checkpoint."""

import json
from pathlib import Path

from ..errors import CheckpointError
from ..short_repr import short_text


def read_json(path: Path) -> dict:
    """Read a JSON object from a file of a checkpoint; {} if there is no such file. Raises CheckpointError."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {short_text(str(error))}", "fetch the model again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object", "fetch the model again")
    return value
