"""The passages of an answer: texts to generate, some from earlier ones, and those on disk that a run has finished."""

import hashlib
import json
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.parallel import Group
from offload.system.files import TEMPORARY, replace_file

from ..distributed.rank import broadcast
from ..output.format import time_left
from ..output.renderers import Renderer
from ..output.turns import Part, Section
from ..run.opened_request import Prompt
from ..run.run import Run

_EXPIRY = 30 * 24 * 3600  # seconds after which a part that no run has used again is removed


class FinishedParts:
    """Texts by model, settings and prompt, in a folder that only its owner can read.

    If the folder cannot be written, nothing is saved, one warning is printed, and the run continues.
    """

    def __init__(self, home: Path, facts: Any, warn: Callable[[str], None], group: Group | None = None) -> None:
        """`facts` is everything that a text depends on beside its prompt, for JSON; rank 0 saves for its group."""
        self._group, self._folder, self._warn = group, home / "parts", warn
        self._facts = json.dumps(facts, sort_keys=True, default=str)
        self._used: set[Path] = set()
        for path in [*self._folder.glob("*.json"), *self._folder.glob(f"{TEMPORARY}*")]:
            with suppress(OSError):  # another process was quicker
                if time.time() - path.stat().st_mtime > _EXPIRY:
                    path.unlink()

    @property
    def any_used(self) -> bool:
        """Return whether this run has found or saved any."""
        return bool(self._used)

    def find(self, ids: list[int]) -> str | None:
        """Return the text for a prompt, or None."""
        return broadcast(self._group, lambda: self._find(ids))

    def _find(self, ids: list[int]) -> str | None:
        path = self._path(ids)
        try:
            text = str(json.loads(path.read_text("utf-8"))["text"])
        except (OSError, ValueError, KeyError, TypeError):  # missing or damaged: generated again
            return None
        self._used.add(path)
        return text

    def save(self, ids: list[int], text: str) -> None:
        """Save a text whole or not at all, even if the power fails."""
        if self._group is not None and self._group.rank > 0:
            return
        path = self._path(ids)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(path, json.dumps({"text": text}, ensure_ascii=False).encode())
            self._used.add(path)
        except OSError as error:
            self._warn(f"finished parts cannot be saved in {self._folder}: {error.strerror or error}")
            self._warn = lambda text: None

    def clear(self) -> None:
        """Remove the parts that this run has used, once the whole summary has succeeded."""
        for path in self._used:
            with suppress(OSError):  # it will expire
                path.unlink(missing_ok=True)

    def _path(self, ids: list[int]) -> Path:
        digest = hashlib.sha256(f"{self._facts}\n{ids}".encode())
        return self._folder / f"{digest.hexdigest()}.json"


@dataclass(frozen=True, slots=True)
class Passage:
    """A text to generate: the notes on a `part`, or the answer itself."""

    prompt: Prompt
    part: Part | None = None


# Yields passages that do not depend on each other, and is sent their texts; the last one is the answer.
Steps = Generator[Sequence[Passage], list[str], None]


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to generate, by its steps."""

    section: Section
    steps: Steps


class PartsLeft:
    """The time that the parts of all documents still take, from those that this run has read."""

    def __init__(self, parts: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`parts` are to be read, besides further rounds."""
        self._parts, self._clock = parts, clock
        self._read, self._seconds = 0, 0.0

    def label(self, part: Part) -> str:
        """Return a part's label with the time left, once a part has been read."""
        left = self._parts - self._read
        if not self._read or left < 1 or part.round > 1:
            return part.label
        return f"{part.label}, {time_left(left * self._seconds / self._read)}"

    @contextmanager
    def reading(self, part: Part) -> Iterator[None]:
        """Count a part that is read meanwhile."""
        started = self._clock()
        yield
        if part.round == 1:
            self._read, self._seconds = self._read + 1, self._seconds + self._clock() - started


def generate_in_order(
    answers: Iterable[Answer], run: Run, finished: FinishedParts, renderer: Renderer, left: PartsLeft
) -> None:
    """Generate one text after the other. Raises what `Run.generate` and the steps raise."""

    def text_of(passage: Passage) -> str:
        if (part := passage.part) is None:
            return run.generate(passage.prompt, renderer)
        text = finished.find(passage.prompt.ids)
        if text is not None:
            renderer.taken_over(part, text)
            return text
        with left.reading(part):
            text = run.generate(passage.prompt, renderer.for_part(part), left.label(part))
        finished.save(passage.prompt.ids, text)
        return text

    for answer in answers:
        renderer.section(answer.section)
        texts = None
        while (passages := following(answer.steps, texts)) is not None:
            texts = list(map(text_of, passages))


def following(steps: Steps, texts: list[str] | None) -> Sequence[Passage] | None:
    """Return the next passages of an answer after the texts of the last ones (None at first); None after all."""
    try:
        return steps.send(texts)
    except StopIteration:
        return None
