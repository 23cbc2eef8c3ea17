"""The files of a batch: lines, read one by one (a million of them need no memory), and results, which a run resumes."""

from __future__ import annotations

import heapq
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from offload.errors import PromptError, SettingsError
from offload.settings.method_sizes import forgets
from offload.short_repr import short_repr
from offload.system.files import Unbounded, copy_bounded
from offload.units import GIB

from ..distributed.rank import broadcast
from ..input.documents import PROMPT_HINT, STDIN, Warn, is_terminal, name_of, unreadable
from ..options.declarations import AUTO
from ..output.output_files import LineFile
from ..output.stdout_formats import json_line
from .line_request import EXAMPLE, Id, LineError, LineRequest, parse_line

if TYPE_CHECKING:
    from ..run.model_request import ModelRequest

LONGEST_LINE = GIB  # bytes, as of a document
MOST_PIPED = 64 * GIB  # bytes of a pipe, which are kept in a temporary file
_MARK = b"\xef\xbb\xbf"


PackedLine = tuple[int, int, str]  # as of `Line.packed`


class Line(NamedTuple):
    """A line that is not blank: its number, where it begins in the file, and its bytes, cut at `LONGEST_LINE`."""

    number: int
    start: int
    data: bytes

    def request(self) -> LineRequest:
        """Return the line's request. Raises LineError."""
        if len(self.data) > LONGEST_LINE:
            error = PromptError(f"longer than {LONGEST_LINE:,} bytes", "give one prompt a line")
            raise LineError(self.number, None, error)
        return parse_line(self.data, self.number)

    def packed(self) -> PackedLine:
        """Return the line for JSON, whatever its bytes are."""
        return self.number, self.start, self.data.decode("utf-8", "surrogateescape")

    @classmethod
    def unpacked(cls, number: int, start: int, text: str) -> Line:
        return cls(number, start, text.encode("utf-8", "surrogateescape"))


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `count` parts of a file, of about as many bytes each: part `index`, from 0."""

    index: int
    count: int

    def has(self, start: int, size: int) -> bool:
        """Return whether a line that begins at byte `start` of `size` is in this part. Neighbours mostly share it."""
        return start * self.count // size == self.index


WHOLE = Shard(0, 1)


def parse_shard(text: str | Shard) -> Shard:
    """Return the part that "I/N" names, such as 0/4. Raises SettingsError."""
    if isinstance(text, Shard):
        return text
    found = re.fullmatch("([0-9]{1,6})/([0-9]{1,6})", text.strip())
    if found is None or not int(found[1]) < int(found[2]):
        hint = "give the part, from 0, and how many there are: --shard $SLURM_PROCID/$SLURM_NTASKS"
        raise SettingsError(f"--shard is {short_repr(text)}", hint)
    return Shard(int(found[1]), int(found[2]))


class BatchFile:
    """A file of lines that can be read several times, one reader after the other.

    Attributes:
        name: for people.
        shard: the part of it that is read.
    """

    def __init__(self, file: IO[bytes], name: str, shard: Shard = WHOLE) -> None:
        self._file, self.name, self.shard = file, name, shard

    @property
    def descriptor(self) -> int:
        """Return the open file's descriptor."""
        return self._file.fileno()

    def lines(self) -> Iterator[Line]:
        """Yield all lines of the part that are not blank, in order."""
        size = self._file.seek(0, os.SEEK_END)
        self._file.seek(0)
        number, start = 0, 0
        while data := self._file.readline(LONGEST_LINE + 1):
            number += 1
            end = self._behind_line(data)
            if number == 1:
                data = data.removeprefix(_MARK)
            if data.strip() and self.shard.has(start, size):
                yield Line(number, start, data)
            start = end

    def line_at(self, number: int, start: int) -> Line:
        """Return a line that `lines` has yielded. It moves the reader."""
        self._file.seek(start)
        data = self._file.readline(LONGEST_LINE + 1)
        return Line(number, start, data.removeprefix(_MARK) if number == 1 else data)

    def close(self) -> None:
        self._file.close()

    def _behind_line(self, data: bytes) -> int:
        """Skip what is left of a line that is too long; return where the next one begins."""
        while len(data) > LONGEST_LINE and not data.endswith(b"\n"):
            data = self._file.readline(LONGEST_LINE + 1)
        return self._file.tell()


def open_batch(path: str, stdin: Any, warn: Warn, shard: Shard = WHOLE) -> BatchFile:
    """Open a part of a file of lines, or of standard input for `-`; a pipe is copied to a temporary file.

    Raises PromptError.
    """
    if path == str(STDIN):
        if stdin is None:
            raise PromptError("standard input is closed", PROMPT_HINT)
        return BatchFile(_copy(getattr(stdin, "buffer", stdin), stdin, name_of(STDIN), warn), name_of(STDIN), shard)
    name = name_of(Path(path))
    try:
        file = Path(path).open("rb")  # noqa: SIM115 - the BatchFile closes it
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return BatchFile(file, name, shard)
        with file:
            return BatchFile(_copy(file, file, name, warn), name, shard)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise unreadable(Path(path), error) from None


def _copy(source: Any, stream: Any, name: str, warn: Warn) -> IO[bytes]:
    if is_terminal(stream):
        warn("reading from the terminal; end it with Ctrl-D")
    copied = tempfile.TemporaryFile()  # noqa: SIM115 - the BatchFile closes it
    try:
        copy_bounded(source, copied, MOST_PIPED)
    except Unbounded as error:
        raise PromptError(f"{name} {error}", error.hint) from None
    return copied


RESULT, ERROR = "result", "error"  # types of events


class ResultFile(LineFile):
    """A file of results to which lines are appended.

    Attributes:
        finished: the ids that have a result in it.
    """

    def __init__(self, path: Path, warn: Warn) -> None:
        """Open or create the file, and drop a last line that was cut. Raises SettingsError, and changes no other file.

        What is no regular file, such as a named pipe, has nothing to resume from.
        """
        super().__init__(path, "--output", "result of a batch", _type_and_id, warn, (RESULT, ERROR), name_of(path))
        self.finished: set[Id] = {id for kind, id in self.kept if kind == RESULT}


def _type_and_id(event: Any) -> tuple[str, Id | None] | None:
    """Return the type and the id of an event of a result file; None if it is not one."""
    if not isinstance(event, dict) or event.get("type") not in (RESULT, ERROR) or "line" not in event:
        return None
    id = event.get("id")
    return (event["type"], id) if isinstance(id, str | int | float | None) else None


def error_line(line: int, id: Id | None, message: str, hint: str) -> str:
    """Return the event of a request that failed."""
    return json_line(type=ERROR, id=id, line=line, message=message, hint=hint)


def opened_for(opened: ModelRequest, line: LineRequest) -> ModelRequest:
    """Return the command's request with the options of a line. Raises PromptError, SettingsError.

    Where neither the command nor the line gives a seed, each line gets its own: equal prompts have different answers.
    """
    request = opened.request
    system = request.system if line.system is None else line.system
    raw = request.raw if line.raw is None else line.raw
    if raw and system is not None:
        raise PromptError("raw and system contradict each other", "raw uses no chat template, which system needs")
    think = request.think if line.think is None else line.think
    if raw and line.think not in (None, AUTO):
        raise PromptError("raw and think contradict each other", "raw uses no chat template, which think needs")
    seed = partial(broadcast, request.group, partial(secrets.randbits, 32))
    return opened.overridden(line.options, seed, system=system, raw=raw, think=think)


_CANDIDATES = 64  # of which the longest is one, as far as their bytes tell
_ENCODED = 4  # of these are tokenized, unless they do not fit the context
_BYTES_A_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Survey:
    """What is in a batch: the requests that are to be answered, and those that are answered already.

    `longest` is the tokens of the longest request, prompt and answer; it is an estimate, from the bytes of all prompts
    and the tokens of the longest ones.
    """

    requests: int
    answered: int
    longest: int


def survey(file: BatchFile, opened: ModelRequest, finished: Collection[Id]) -> Survey:
    """Read all lines once. What is wrong with a line is left to the second reading.

    Raises PromptError if a whole file has no line, and for several of which none is a request: it is another file.
    """
    answered = requests = wrong = 0
    repeatable = set(finished)  # ids that no line before has had: a second one has no result
    longest: list[tuple[float, int, int]] = []  # a heap: the size in tokens, as guessed, and where the line is
    usual = opened.settings.generation.max_new_tokens
    for line in file.lines():
        size = _size(line, usual, repeatable)
        if size is None:
            answered += 1
            continue
        requests += 1
        wrong += size == 0
        heapq.heappush(longest, (size, line.number, line.start))
        if len(longest) > _CANDIDATES:
            heapq.heappop(longest)
    if not requests and not answered and file.shard == WHOLE:
        raise PromptError(f"{file.name} has no requests", EXAMPLE)
    if 1 < wrong == requests and not answered and file.shard == WHOLE:
        raise PromptError(f"none of the {wrong:,} lines of {file.name} is a request", EXAMPLE)
    places = [(number, start) for _, number, start in sorted(longest, reverse=True)]
    return Survey(requests, answered, _longest(file, opened, places))


def _size(line: Line, usual: int, finished: set[Id]) -> float | None:
    """Return about how many tokens a line's sequence may have, 0 if the line is wrong; None if it is answered.

    Its id is taken out of those that are `finished`: another line with it has no result.
    """
    try:
        request = line.request()
    except LineError:
        return 0.0
    if request.id in finished:
        finished.remove(request.id)
        return None
    text = len(request.prompt.encode()) + len((request.system or "").encode())
    return text / _BYTES_A_TOKEN + request.options.get("max_new_tokens", usual)


def _longest(file: BatchFile, opened: ModelRequest, places: list[tuple[int, int]]) -> int:
    """Return the tokens of the longest sequence; of those that do not fit the context, only with --extend-context."""
    found: list[int] = []
    for number, start in places:
        try:
            request = file.line_at(number, start).request()
            ours = opened_for(opened, request)
            ids = ours.encode(request.prompt)
            is_stretched = opened.request.extend_context and not forgets(opened.settings.speculation)
            new = ours.settings.generation.max_new_tokens
            found.append(len(ids) + new if is_stretched else ours.prompt(ids).length)
        except Exception:  # of any kind: the second reading reports it
            continue
        if len(found) == _ENCODED:
            break
    return max(found, default=opened.context)
