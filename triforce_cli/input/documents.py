"""Reads documents and prompts from files, stdin and the argument: the bytes here, their text in converters.py."""

import os
import stat
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from mimetypes import guess_type
from pathlib import Path
from shlex import quote
from typing import Any

from offload.api.ask_options import join_texts, places_in_joined
from offload.errors import PromptError
from offload.system.files import Unbounded, read_bounded
from offload.units import GIB, counted

from .converters import SUFFIXES, text_of
from .encoding import decode

Warn = Callable[[str], None]

LIMIT = GIB  # bytes of one document: a PDF may be large, while a text of a hundredth of this exceeds most contexts
STDIN = Path("-")
_MOST_NAMED = 20  # files of a folder
PROMPT_HINT = (
    'give text (triforce generate "Hello"), a file (triforce generate -f book.txt) '
    "or a pipe (cat book.txt | triforce generate)"
)


@dataclass(frozen=True, slots=True)
class Document:
    """A text, and its name for the user."""

    name: str
    text: str


def read_documents(files: Sequence[Path | str], stdin: Any, warn: Warn) -> list[Document]:
    """Return each file's document, in order; `-` is standard input.

    Raises PromptError for a file that cannot be read, is not text, or is blank.
    """
    documents = [Document(name_of(path), read(path, stdin, warn)) for path in checked(files)]
    for document in documents:
        if not document.text.strip():
            raise PromptError(f"{document.name} is empty", "give a document with some text")
    return documents


def checked(files: Sequence[Path | str]) -> list[Path]:
    """Return the names as paths. Raises PromptError for an empty name and for standard input given twice."""
    if "" in map(str, files):
        raise PromptError("the name of a prompt file is empty", "check whether a shell variable is unset")
    paths = [Path(file) if str(file) == "-" or Path(file) != STDIN else Path(file).absolute() for file in files]  # ./-
    if paths.count(STDIN) > 1:
        raise PromptError("standard input (-) is given twice", "it can be read only once: give - once")
    return paths


def files_in(names: Sequence[str], note: Callable[[str], None]) -> list[str]:
    """Return the files, with a folder's documents in its place, which `note` lists; nothing is read.

    Raises PromptError for what is not there: before anything slow is imported.
    """
    files: list[str] = []
    for path in checked(names):
        try:
            is_folder = path != STDIN and stat.S_ISDIR(path.stat().st_mode)
            inside = sorted(each for each in path.iterdir() if _is_document(each)) if is_folder else [path]
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            raise unreadable(path, error) from None
        if not inside:
            raise PromptError(
                f"the folder {path} has no text files", f"give files by their names: ls {quote(str(path))}"
            )
        if is_folder:
            names = [each.name for each in inside[:_MOST_NAMED]] + ["..."] * (len(inside) > _MOST_NAMED)
            note(f"{path}: {counted(len(inside), 'file')}: {', '.join(names)}")
        files += map(str, inside)
    return files


def _is_document(path: Path) -> bool:
    """Return whether a file of a folder is a text or a document, by its name. Hidden and empty files are left out."""
    is_text = (guess_type(path.name)[0] or "").startswith("text/") or path.suffix.lower() in SUFFIXES
    return is_text and not path.name.startswith(".") and path.is_file() and path.stat().st_size > 0


def name_of(path: Path) -> str:
    """Return a path's name for people and for the model; bytes that are not text are replaced."""
    return "standard input" if path == STDIN else os.fsencode(path).decode("utf-8", "replace")


def read(path: Path, stdin: Any, warn: Warn) -> str:
    """Return the text of a file, or of standard input, of up to LIMIT bytes. Raises PromptError."""
    is_stdin, name = path == STDIN, name_of(path)
    if is_stdin and stdin is None:
        raise PromptError("standard input is closed", PROMPT_HINT)
    try:
        with nullcontext(stdin) if is_stdin else path.open("rb", buffering=0) as file:
            if is_terminal(file):  # such as /dev/stdin
                warn("reading from the terminal; end it with Ctrl-D")
            data = read_bounded(getattr(file, "buffer", file), LIMIT)
    except Unbounded as error:
        raise PromptError(f"{name} {error}", error.hint) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name, or a closed stream
        if is_stdin:
            raise PromptError(f"standard input cannot be read: {error}", PROMPT_HINT) from None
        raise unreadable(path, error) from None
    return text_of(data, name, "" if is_stdin else path.suffix, warn)


def is_terminal(stdin: Any) -> bool:
    try:
        return bool(stdin.isatty())
    except (AttributeError, ValueError):
        return False


def unreadable(path: Path, error: OSError | ValueError) -> PromptError:
    """Return the error for a path that cannot be opened or read."""
    if isinstance(error, FileNotFoundError):
        if path.is_symlink():
            return PromptError(f"{path} is a link to {path.readlink()}, which is not there", f"see: ls -l {path}")
        return PromptError(f"there is no file {path}", _did_you_mean(path))
    if isinstance(error, IsADirectoryError):
        return PromptError(f"{path} is a folder", f"give a file in it: ls {quote(str(path))}")
    if isinstance(error, PermissionError):
        return PromptError(f"{path} may not be read: permission denied", f"check its permissions: ls -l {path}")
    reason = getattr(error, "strerror", None) or str(error)
    return PromptError(f"{path} cannot be read: {reason}", "give the path of a text file")


def _did_you_mean(path: Path) -> str:
    folder = path.parent
    if path.parts[:1] in (("http:",), ("https:",)):
        return f"fetch the page first: curl -LO {quote(str(path).replace(':/', '://', 1))}"
    if path.name.endswith("?"):
        return f'a question about a file is asked so: triforce summarize FILE --question "{path}"'
    try:
        names = os.listdir(folder)
    except OSError:
        return f"there is no folder {folder} either; the path is looked up from {Path.cwd()}"
    close = get_close_matches(path.name, names, n=1, cutoff=0.75)  # a common suffix alone is not close
    return f"did you mean {folder / close[0]}?" if close else f"the path is looked up from {Path.cwd()}"


@dataclass(frozen=True, slots=True)
class PromptText:
    """The text of a prompt: a document with its name, and what the argument asks about it ("" for nothing).

    An argument without files and standard input is the document. `parts` are the names of what was joined to it, each
    with the place in the document, in characters, of its own beginning.
    """

    name: str
    document: str
    question: str = ""
    parts: Sequence[tuple[str, int]] = ()

    @property
    def text(self) -> str:
        return join_texts([self.document, self.question]) if self.question else self.document


def read_prompt(argument: str | None, files: Sequence[Path | str], stdin: Any, warn: Warn) -> PromptText:
    """Return the prompt, whose text is that of the files in order, standard input, and the argument last.

    The file `-` is standard input, and so is the argument `-`; without them, standard input comes after the files if
    something is piped or redirected into it (a terminal and /dev/null are not read). Parts are joined with exactly one
    blank line: newlines around a joint are replaced, everything else is unchanged. Blank parts are left out, with a
    warning if they were named. Raises PromptError for a file that cannot be read or is not text, and if all are blank.
    """
    if argument == str(STDIN):
        files, argument = [*files, STDIN], None
    paths = checked(files)
    implicit = STDIN not in paths and has_input(stdin)
    named = (*paths, *([STDIN] * implicit))
    parts = [(name_of(path), read(path, stdin, warn)) for path in named]
    if argument is not None:
        parts.append(("the prompt argument", _from_argument(argument, warn)))
    if not parts:
        raise PromptError("no prompt", PROMPT_HINT)
    found = [(name, text) for name, text in parts if text.strip()]
    blank = [name for name, text in parts if not text.strip()]
    if not found:
        raise PromptError(f"the prompt is empty ({', '.join(blank)})", PROMPT_HINT)
    for name in blank:
        if not (implicit and name == name_of(STDIN)):
            warn(f"{name} is empty")
    question = found.pop()[1] if len(found) > 1 and argument is not None and argument.strip() else ""
    texts = [text for _, text in found]
    places = zip((name for name, _ in found), places_in_joined(texts), strict=True)
    return PromptText(", ".join(name for name, _ in found), join_texts(texts), question, list(places))


def _from_argument(argument: str, warn: Warn) -> str:
    try:
        argument.encode("utf-8")
        return argument
    except UnicodeEncodeError:
        pass
    try:  # bytes that were not valid in the locale arrive as lone surrogates: they are decoded as a file's are
        return decode(os.fsencode(argument), "the prompt argument", warn)
    except UnicodeEncodeError:
        raise PromptError("the prompt argument is not valid Unicode", "give it in a file, as UTF-8") from None


def has_input(stdin: Any) -> bool:
    """Return whether something is piped or redirected into standard input."""
    if stdin is None or is_terminal(stdin):
        return False
    try:
        mode = os.fstat(stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return not getattr(stdin, "closed", True)  # an object in memory, without a file descriptor
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)
