"""The prompt: files, standard input and the argument -> one text."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offload.errors import PromptError

from .documents import PROMPT_HINT, STDIN, Warn, checked, is_terminal, name_of, read, read_stdin
from .encoding import decode


def read_prompt(argument: str | None, files: Sequence[Path | str], stdin: Any, warn: Warn) -> str:
    """Return one text from the files in order, standard input, and the argument last.

    The file `-` is standard input, and so is the argument `-`; without them, standard input comes after the files if
    something is piped or redirected into it (a terminal and /dev/null are not read). Parts are joined with exactly one
    blank line: newlines around a joint are replaced, everything else is unchanged. Blank parts are left out, with a
    warning if they were named. Raises PromptError for a file that cannot be read or is not text, and if nothing
    is left.
    """
    if argument == str(STDIN):
        files, argument = [*files, STDIN], None
    paths = checked(files)
    parts = [(name_of(path), read(path, stdin, warn)) for path in paths]
    implicit = STDIN not in paths and _has_input(stdin)
    if implicit:
        parts.append((name_of(STDIN), read_stdin(stdin, warn)))
    if argument is not None:
        parts.append(("the prompt argument", _from_argument(argument, warn)))
    if not parts:
        raise PromptError("no prompt", PROMPT_HINT)
    texts = [text for _, text in parts if text.strip()]
    blank = [name for name, text in parts if not text.strip()]
    if not texts:
        raise PromptError(f"the prompt is empty ({', '.join(blank)})", PROMPT_HINT)
    for name in blank:
        if not (implicit and name == name_of(STDIN)):
            warn(f"{name} is empty")
    return join_texts(texts)


def join_texts(texts: Sequence[str]) -> str:
    """Return texts as one, with one blank line at each joint; everything else is unchanged."""
    joined = texts[0]
    for text in texts[1:]:
        joined = joined.rstrip("\n") + "\n\n" + text.lstrip("\n")
    return joined


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


def _has_input(stdin: Any) -> bool:
    """Return whether something is piped or redirected into standard input."""
    if stdin is None or is_terminal(stdin):
        return False
    try:
        mode = os.fstat(stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return not getattr(stdin, "closed", True)  # an object in memory, without a file descriptor
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)
