"""The instructions of `summarize`, the templates they stand in, and how many tokens an answer may take."""

import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from offload.api.ask_options import join_texts
from offload.errors import SettingsError

from ..input.documents import STDIN, read

LENGTHS = {  # in words, and the most tokens: well above what the words take, in any language
    "short": ("in two or three sentences", 192),
    "medium": ("in one or two paragraphs", 512),
    "long": ("in detail, in five to eight paragraphs", 1536),
}
DEFAULT_LENGTH = "medium"
_WORDS = re.compile(r"(\d{1,6})(\s*words?)?", re.IGNORECASE)
_TOKENS_A_WORD, _AT_LEAST = 3, 64


@dataclass(frozen=True, slots=True)
class AnswerStyle:
    """The style of an answer. Without a `length` a summary has the default one, and an answer any."""

    length: str | None = None
    bullets: bool = False
    focus: str | None = None
    language: str | None = None
    schema: str | None = None  # of JSON that answers are
    quotes: bool = False  # whether answers are to quote
    verbatim: bool = False  # whether the question alone is the instruction, "" for none

    def __post_init__(self) -> None:
        self._length()
        for name, text in (("--focus", self.focus), ("--language", self.language)):
            if text is not None and not text.strip():
                raise SettingsError(f"{name} is empty", "give it a value, or leave it out")

    def instruction(self, question: str | None = None) -> str:
        """Return the instruction for a whole document: to summarize it, or to answer a question about it."""
        if self.verbatim:
            return question or ""
        if question is None:
            return f"Summarize the text above {self._length()[0]}.{self._style('the summary')}{self._form()}"
        ending = f" Answer {self._length()[0]}." if self.length else ""
        asked = f"Answer this question about the text above: {question.strip()}{ending}"
        return asked + self._style("the answer") + self._form()

    def note_taking(self, question: str | None = None) -> str:
        """Return the instruction for a part of a document: to note what the answer will need."""
        if question is None:
            plain = AnswerStyle(focus=self.focus, language=self.language)
            return plain.instruction() + self._form()
        asked = "Write down everything in the text above that helps to answer this question"
        return f"{asked}: {question.strip()}{self._form()}"

    def _form(self) -> str:
        """Return what the model is told of the form that its answers are bound to."""
        if self.quotes:
            return ' Quote the text word for word, between "quotation marks".'
        return "" if self.schema is None else f" Answer with JSON of this schema: {self.schema}"

    @property
    def new_tokens(self) -> int:
        """The most tokens that an answer of this length may take."""
        return self._length()[1]

    def _style(self, what: str) -> str:
        style = ' Write bullet points, each on a line that begins with "- ".' if self.bullets else ""
        if self.focus:
            style += f" Focus on this: {self.focus.strip()}."
        return f"{style} Write {what} in {self.language.strip()}." if self.language else style

    def _length(self) -> tuple[str, int]:
        name = (DEFAULT_LENGTH if self.length is None else self.length).strip().lower()
        if name in LENGTHS:
            return LENGTHS[name]
        match = _WORDS.fullmatch(name)
        words = int(match[1]) if match else 0
        if not words:
            raise SettingsError(
                f"length is {self.length!r}", f"use {', '.join(LENGTHS)}, or a number of words, such as 200"
            )
        return "in one word" if words == 1 else f"in about {words} words", _TOKENS_A_WORD * words + _AT_LEAST


_PLACEHOLDERS = re.compile(r"\{(document|instruction)\}")


@dataclass(frozen=True, slots=True)
class Template:
    """A text with placeholders. They are replaced in one pass: documents contain braces."""

    text: str

    def filled(self, document: str, instruction: str) -> str:
        """Return the text with its placeholders replaced."""
        values = {"document": document, "instruction": instruction}
        return _PLACEHOLDERS.sub(lambda match: values[match[1]], self.text)


@dataclass(frozen=True, slots=True)
class Joined(Template):
    """The prompts of `generate`: a document, and behind a blank line the question, if there is one."""

    text: str = "{document}"

    def filled(self, document: str, instruction: str) -> str:
        return join_texts([document, instruction]) if instruction else document


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
        hint = "give the file, or leave it out; a document may be -"
        raise SettingsError("--prompt takes a template file, not standard input", hint)
    if path is None:
        own = (files("triforce_cli") / "templates" / f"{name}.txt" for name in ("document", "part", "notes"))
        return Templates(*(Template(file.read_text("utf-8").rstrip("\n")) for file in own))
    text = read(path, None, lambda warning: None)
    if text.count("{document}") != 1:
        hint = "put {document} into it, best at the beginning, and {instruction} after it"
        raise SettingsError(f"the template {path} has {{document}} {text.count('{document}')} times, not once", hint)
    return Templates(*[Template(text)] * 3)
