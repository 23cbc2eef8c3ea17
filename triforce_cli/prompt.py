"""The prompt: files, standard input and the argument -> one text."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from offload.errors import PromptError

from .decoding import decode

Warn = Callable[[str], None]

_STDIN = Path("-")
_WAYS = (
    'give text (triforce generate "Hello"), a file (--prompt-file book.txt) '
    "or a pipe (cat book.txt | triforce generate)"
)


def read_prompt(argument: str | None, files: Sequence[Path | str], stdin: Any, warn: Warn) -> str:
    """One text from the files in their order, standard input, and the argument last.

    The file `-` is standard input; without it, standard input comes after the files if something is piped or
    redirected into it (a terminal and /dev/null are not read). Parts are joined with exactly one blank line: newlines
    around a joint are replaced, everything else stays as it was. Blank parts are left out, with a warning if they
    were asked for. Raises PromptError for a file that cannot be read or is no text, and if nothing remains.
    """
    if "" in map(str, files):
        raise PromptError("the name of a prompt file is empty", "was a shell variable not set?")
    paths = [Path(file) for file in files]
    if paths.count(_STDIN) > 1:
        raise PromptError("standard input (-) is given twice", "it can be read only once: give - once")
    parts = [(_name(path), _read(path, stdin, warn)) for path in paths]
    unasked = _STDIN not in paths and _is_fed(stdin)
    if unasked:
        parts.append((_name(_STDIN), _read_stdin(stdin, warn)))
    if argument is not None:
        parts.append(("the prompt argument", _from_argument(argument, warn)))
    if not parts:
        raise PromptError("no prompt", _WAYS)
    texts = [text for _, text in parts if text.strip()]
    blank = [name for name, text in parts if not text.strip()]
    if not texts:
        raise PromptError(f"the prompt is empty ({', '.join(blank)})", _WAYS)
    for name in blank:
        if not (unasked and name == _name(_STDIN)):
            warn(f"{name} is empty")
    return _join(texts)


def _join(texts: Sequence[str]) -> str:
    joined = texts[0]
    for text in texts[1:]:
        joined = joined.rstrip("\n") + "\n\n" + text.lstrip("\n")
    return joined


def _name(path: Path) -> str:
    return "standard input" if path == _STDIN else str(path)


def _read(path: Path, stdin: Any, warn: Warn) -> str:
    if path == _STDIN:
        if _is_terminal(stdin):
            warn("reading the prompt from the terminal; end it with Ctrl-D")
        return _read_stdin(stdin, warn)
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise _unreadable(path, error) from None
    return decode(data, str(path), warn)


def _unreadable(path: Path, error: OSError | ValueError) -> PromptError:
    if isinstance(error, FileNotFoundError):
        return PromptError(f"there is no file {path}", _did_you_mean(path))
    if isinstance(error, IsADirectoryError):
        return PromptError(f"{path} is a folder", "give the files in it one by one, each with --prompt-file")
    if isinstance(error, PermissionError):
        return PromptError(f"{path} may not be read: permission denied", f"look at its permissions: ls -l {path}")
    reason = getattr(error, "strerror", None) or str(error)
    return PromptError(f"{path} cannot be read: {reason}", "give the path of a text file")


def _did_you_mean(path: Path) -> str:
    folder = path.parent
    try:
        names = os.listdir(folder)
    except OSError:
        return f"there is no folder {folder} either; the path is looked up from {Path.cwd()}"
    close = get_close_matches(path.name, names, n=1)
    return f"did you mean {folder / close[0]}?" if close else f"the path is looked up from {Path.cwd()}"


def _from_argument(argument: str, warn: Warn) -> str:
    try:
        argument.encode("utf-8")
        return argument
    except UnicodeEncodeError:
        pass
    try:  # bytes that were not valid in the locale arrive as lone surrogates: they get the treatment of a file
        return decode(os.fsencode(argument), "the prompt argument", warn)
    except UnicodeEncodeError:
        raise PromptError("the prompt argument is not valid Unicode", "give it in a file, as UTF-8") from None


def _read_stdin(stdin: Any, warn: Warn) -> str:
    if stdin is None:
        raise PromptError("standard input is closed", _WAYS)
    try:
        data = getattr(stdin, "buffer", stdin).read()
    except (OSError, ValueError) as error:  # ValueError: closed
        raise PromptError(f"standard input cannot be read: {error}", _WAYS) from None
    if isinstance(data, str):  # a text stream without bytes below, as notebooks and tests have
        data = data.encode("utf-8", errors="replace")
    return decode(data, "standard input", warn)


def _is_terminal(stdin: Any) -> bool:
    try:
        return bool(stdin.isatty())
    except (AttributeError, ValueError):
        return False


def _is_fed(stdin: Any) -> bool:
    """Whether somebody piped or redirected something into standard input."""
    if stdin is None or _is_terminal(stdin):
        return False
    try:
        mode = os.fstat(stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return not getattr(stdin, "closed", True)  # no real file below: an object that holds what it gives
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)
