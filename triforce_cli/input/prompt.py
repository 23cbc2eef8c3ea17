"""The prompt: files, standard input and the argument -> one text."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.api.ask_options import join_texts
from offload.errors import PromptError

from .converters import end_conversions
from .documents import PROMPT_HINT, STDIN, Warn, checked, is_terminal, name_of, read
from .encoding import decode


@dataclass(frozen=True, slots=True)
class PromptText:
    """The text of a prompt: a document with its name, and what the argument asks about it ("" for nothing).

    An argument without files and standard input is the document.
    """

    name: str
    document: str
    question: str = ""

    @property
    def text(self) -> str:
        return self.around(self.document)

    def around(self, document: str) -> str:
        """Return the text with another document."""
        return join_texts([document, self.question]) if self.question else document


def read_prompt(
    argument: str | None, files: Sequence[Path | str], stdin: Any, warn: Warn, encoding: str | None = None
) -> PromptText:
    """Return the prompt, whose text is that of the files in order, standard input, and the argument last.

    The file `-` is standard input, and so is the argument `-`; without them, standard input comes after the files if
    something is piped or redirected into it (a terminal and /dev/null are not read). Parts are joined with exactly one
    blank line: newlines around a joint are replaced, everything else is unchanged. Blank parts are left out, with a
    warning if they were named. Files and standard input are in the `encoding`; None guesses it. Raises PromptError for
    a file that cannot be read or is not text, and if nothing is left.
    """
    if argument == str(STDIN):
        files, argument = [*files, STDIN], None
    paths = checked(files)
    implicit = STDIN not in paths and has_input(stdin)
    try:
        parts = [
            (name_of(path), read(path, stdin, warn, encoding=encoding)) for path in (*paths, *([STDIN] * implicit))
        ]
    finally:
        end_conversions()
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
    return PromptText(", ".join(name for name, _ in found), join_texts([text for _, text in found]), question)


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
