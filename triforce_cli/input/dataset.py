"""Data sets as prompts, such as PG-19 and NarrativeQA: a folder, a file of JSON lines, or a hub's data set.

A `.txt` file is one text. A line of a `.jsonl` file is an object with a `text` and, if it is asked about, a `question`;
rows of a `.parquet` file have the same columns. NarrativeQA's `document` with a `text` counts as the text.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.errors import FetchError, PromptError, SettingsError
from offload.short_repr import first_line, short_repr

from .documents import LIMIT, name_of, read

FORMATS = (".txt", ".jsonl", ".parquet")
_HINT = "give a folder or a file of texts (.txt), or of JSON lines with `text` and `question` (.jsonl)"
_COLUMNS = ("text", "document", "question", "title")


@dataclass(frozen=True, slots=True)
class DataText:
    """A text of a data set, and what is asked about it; "" for texts that are continued."""

    name: str
    text: str
    question: str = ""


def check_dataset(source: str) -> None:
    """Check, without reading, that a source is there or may be on the hub. Raises SettingsError."""
    if not _is_hub_id(source) and not Path(source).expanduser().exists():
        raise SettingsError(f"there is no data set {short_repr(source)}", f"{_HINT}, or a hub's owner/name")


def read_dataset(source: str, warn: Callable[[str], None]) -> list[DataText]:
    """Return the texts of a data set in the order of their files' names; of the hub's, of what was fetched.

    A hub id may name files: `owner/name:data/test-*.parquet`. Raises PromptError for what is no text, FetchError.
    """
    path = _fetched(source) if _is_hub_id(source) else Path(source).expanduser()
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.suffix in FORMATS)
    found = [text for file in files for text in _texts(file, path, warn)]
    if not found:
        raise PromptError(f"{source} has no texts", _HINT)
    return found


def _is_hub_id(source: str) -> bool:
    name = source.partition(":")[0]
    is_name = name.count("/") == 1 and not name.startswith((".", "/", "~")) and all(name.split("/"))
    return is_name and not name.endswith(FORMATS) and not Path(source).exists()


def _fetched(source: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    name, _, pattern = source.partition(":")
    patterns = [pattern] if pattern else [f"*{suffix}" for suffix in FORMATS]
    try:
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=patterns))
    except Exception as error:  # huggingface_hub and its HTTP client raise dozens of types
        reason = first_line(error)
        if isinstance(error, LocalEntryNotFoundError | ConnectionError):
            message = f"no folder {name} here, and the hub cannot be reached to fetch a data set: {reason}"
            raise FetchError(message, _HINT) from error
        raise FetchError(f"the data set {name} cannot be fetched: {reason}", f"or {_HINT}") from error


def _texts(file: Path, folder: Path, warn: Callable[[str], None]) -> Iterator[DataText]:
    name = name_of(file.relative_to(folder) if file != folder else Path(file.name))
    if file.suffix == ".parquet":
        records = _parquet(file)
    elif file.suffix == ".jsonl":
        records = _lines(read(file, None, warn, LIMIT), name)
    else:
        records = iter([{"text": read(file, None, warn, LIMIT)}])
    for number, record in enumerate(records, 1):
        yield _text(record, name if file.suffix == ".txt" else f"{name}:{number}")


def _lines(text: str, name: str) -> Iterator[Any]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                raise PromptError(f"{name}, line {number} is no JSON: {short_repr(line)}", _HINT) from error


def _parquet(file: Path) -> Iterator[Any]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        hint = "pip install pyarrow; or write its rows as JSON lines"
        raise SettingsError(f"{file.name} is a Parquet file, which pyarrow reads", hint) from None
    try:
        with ParquetFile(file) as table:
            columns = [name for name in _COLUMNS if name in table.schema_arrow.names]
            for batch in table.iter_batches(batch_size=16, columns=columns):  # of long texts
                yield from batch.to_pylist()
    except (ArrowException, OSError) as error:
        message = f"{file.name} cannot be read as a Parquet file: {first_line(error)}"
        raise PromptError(message, "fetch or write it again") from error


def _text(record: Any, name: str) -> DataText:
    """Return the text of a record. Raises PromptError for one without."""
    values = record if isinstance(record, Mapping) else {}
    text, question = _own(values.get("text", values.get("document"))), _own(values.get("question"))
    if not isinstance(text, str) or not text.strip() or not isinstance(question or "", str):
        raise PromptError(f"{name} has no text: {short_repr(record)}", _HINT)
    return DataText(name, text, question or "")


def _own(value: Any) -> Any:
    """Return a text, or that of an object with one."""
    return value.get("text") if isinstance(value, Mapping) else value


def asked(question: str) -> str:
    """Return what stands after a text to ask a question about it; "" for none."""
    return f"\n\nQuestion: {question.strip()}\nAnswer:" if question else ""
