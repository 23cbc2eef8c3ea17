"""Prompt templates: plain text with {document} and {instruction}, the document first.

A prefix that is the same for every instruction is read once, so the longest part of a prompt must come first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from offload.errors import SettingsError

from ..input.documents import STDIN, read

_LIMIT = 16 * 2**20  # bytes of a template
_PLACEHOLDERS = re.compile(r"\{(document|instruction)\}")


@dataclass(frozen=True, slots=True)
class Template:
    """A text with placeholders. They are replaced in one pass: documents contain braces."""

    text: str

    def filled(self, document: str, instruction: str) -> str:
        """Return the text with its placeholders replaced."""
        values = {"document": document, "instruction": instruction}
        return _PLACEHOLDERS.sub(lambda match: values[match[1]], self.text)

    @property
    def takes_instructions(self) -> bool:
        return "{instruction}" in self.text


@dataclass(frozen=True, slots=True)
class Templates:
    """The templates for a whole document, for a part of one, and for the notes that were taken on all parts."""

    document: Template
    part: Template
    notes: Template


def load_templates(path: Path | None = None) -> Templates:
    """Return the program's templates, or the user's for all three.

    Raises PromptError if the file cannot be read, SettingsError if {document} is not in it exactly once.
    """
    if path == STDIN:
        raise SettingsError(
            "--prompt takes a template file, not standard input", "give the file, or leave it out; a document may be -"
        )
    if path is None:
        return Templates(*(_packaged(name) for name in ("document", "part", "notes")))
    text = read(path, None, lambda warning: None, _LIMIT)
    if "{document}" not in text:
        raise SettingsError(
            f"the template {path} has no {{document}}",
            "put {document} into it, best at the beginning, and {instruction} after it",
        )
    if text.count("{document}") > 1:
        raise SettingsError(f"the template {path} has {{document}} twice", "write {document} once")
    return Templates(*[Template(text)] * 3)


def _packaged(name: str) -> Template:
    return Template((files("triforce_cli") / "templates" / f"{name}.txt").read_text("utf-8").rstrip("\n"))
