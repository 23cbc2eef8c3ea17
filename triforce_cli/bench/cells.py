"""The runs of a benchmark, as lines of the file that --points names, and what identifies each and its weights."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from offload.api.opened_model import OpenModel
from offload.loading.weights_digest import weights_digest
from offload.settings.config import Speculation
from offload.settings.method_sizes import has_draft_model

from ..input.documents import name_of
from ..output.output_files import LineFile
from ..output.stdout_formats import json_line
from ..run.prompt_cache import prompt_folder
from .report import ACCEPTED

TYPE = "bench_run"
_KINDS = {  # of the fields that a line must have
    "prompt_sha256": str,
    "prompt_tokens": int,
    "method": str,
    "repeat": int,
    "settings": dict,
    "machine": dict,
    "tokens_per_s": float | int | None,
    "tbt_median_s": float | int | None,
    "tokens_per_verification": float | int | None,
    "acceptance": dict,
    "tokens": list,
    "sampling": str,
}

IDENTIFYING = ("prompt_sha256", "prompt_tokens", "method", "repeat", "settings")

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Cell:
    """What a run measures: a method on one prompt, with one combination of the settings that vary.

    Args:
        prompt: its number.
        context: tokens of it, None for all.
        values: the settings that vary, in the order of the axes; None for one that the method does not read.
        batch: sequences that are decoded together.
    """

    prompt: int
    context: int | None
    method: str
    values: tuple[tuple[str, Any], ...]
    batch: int = 1

    @property
    def group(self) -> tuple[Any, ...]:
        """Return what a row of the report is about: the cell without its prompt."""
        return self.context, self.batch, self.method, self.values


def digest(ids: Sequence[int] | Sequence[list[int]]) -> str:
    """Return what identifies a prompt, or those of a batch: the SHA-256 of its token ids."""
    return hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()


def identity(record: Record, names: Sequence[str] = IDENTIFYING) -> str:
    """Return everything that a run's result depends on, as text: two runs with the same are the same measurement."""
    facts = {name: record[name] for name in names} | {"machine": record["machine"].get("name")}
    return json.dumps(_normalised(facts), sort_keys=True, default=str)


def _normalised(value: Any) -> Any:
    """Return a value with whole floats as integers: an experiment's 0 is the 0.0 of the command line."""
    if isinstance(value, Mapping):
        return {name: _normalised(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_normalised(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


class PointsFile(LineFile):
    """The file of finished runs. `kept` has the records that were in it."""

    def __init__(
        self,
        path: Path,
        warn: Callable[[str], None],
        type: str = TYPE,
        what: str = "run of a benchmark",
        kinds: Mapping[str, Any] = _KINDS,
    ) -> None:
        """See LineFile. Its lines have a `type`, and fields of some `kinds`."""
        super().__init__(path, "--points", what, partial(_record, type, kinds), warn, (type,), name_of(path))

    def append(self, record: Record) -> None:
        """Append a finished run. Raises OSError."""
        self.write(json_line(**record))


def by_identity(records: Iterable[Record]) -> dict[str, Record]:
    """Return the records by what identifies them; of several, the last one."""
    return {identity(record): record for record in records}


def _record(type: str, kinds: Mapping[str, Any], value: Any) -> Record | None:
    if not isinstance(value, dict) or value.get("type") != type:
        return None
    is_whole = all(name in value and isinstance(value[name], kind) for name, kind in kinds.items())
    earlier: dict[str, Any] = {ACCEPTED: {}} if type == TYPE else {}  # which earlier versions did not record
    return earlier | value if is_whole else None


@dataclass(frozen=True, slots=True)
class Weights:
    """The digests of the model's and the draft model's weight files; None where they were not read."""

    model: str | None = None
    draft: str | None = None

    def read_by(self, method: Speculation) -> dict[str, str]:
        """Return the digests, by name, of the weights that a method runs."""
        found = {"weights": self.model, "draft_weights": self.draft if has_draft_model(method) else None}
        return {name: digest for name, digest in found.items() if digest is not None}


def weights_of(model: OpenModel, home: Path | None) -> Weights:
    """Read the weight files, or what was noted of them beside the prompt cache. Raises OSError."""
    folder = prompt_folder(home, 0).path
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        pass  # the next run reads the files again
    notes = folder / "weights.json"
    draft = None if model.draft is None else weights_digest(model.draft.files(), notes)
    return Weights(weights_digest(model.checkpoint.files(), notes), draft)
