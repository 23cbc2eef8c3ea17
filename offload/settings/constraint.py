"""What an answer must match: a JSON schema, a regular expression, a grammar, one of several texts, or quotations."""

from __future__ import annotations

from dataclasses import dataclass

from .validation import require, require_one_of, require_types

JSON_SCHEMA, REGEX, GRAMMAR, CHOICES, QUOTE = KINDS = ("json-schema", "regex", "grammar", "choices", "quote")


@dataclass(frozen=True, slots=True)
class Constraint:
    """Describe a language that an answer must be of. Raises SettingsError.

    Attributes:
        kind: one of KINDS.
        text: the JSON schema; the regular expression; the grammar, in Lark's or GBNF's notation; the choices as a JSON
            list of texts; or the document that every quotation must be a literal part of.
        after_thinking: whether a reasoning model may think before; None: in a chat.
    """

    kind: str
    text: str
    after_thinking: bool | None = None

    def __post_init__(self) -> None:
        require_types(self)
        require_one_of("constraint", self.kind, KINDS)
        require(bool(self.text.strip()), f"{self.kind} is empty", "give it a text, or leave it out")
