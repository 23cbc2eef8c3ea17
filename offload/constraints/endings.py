"""Refuse schemas and grammars that contain themselves without an end: an answer would run to its limit."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import SettingsError


def check_ends(schema: Mapping[str, Any]) -> None:
    """Raise SettingsError for a schema whose values all contain another one of the same schema, with its place."""
    _Endings(schema).check(schema, "", ())


class _Endings:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root

    def check(self, schema: Any, at: str, within: tuple[str, ...]) -> None:
        """Raise SettingsError if no value of a schema ends. `within` are the references that led to it."""
        if not isinstance(schema, dict):
            return
        if (target := schema.get("$ref")) is not None:
            if target in within:
                raise SettingsError(
                    f"the JSON schema cannot end at {at or 'its top'}: it requires another {target}, without end",
                    "let it be left out, such as by not listing it in required",
                )
            self.check(self._resolved(target), at, (*within, target))
        if isinstance(properties := schema.get("properties"), dict):
            for name in schema.get("required", ()):
                self.check(properties.get(name), f"{at}/properties/{name}", within or ("#",))
        if schema.get("minItems", 0) > 0:
            self.check(schema.get("items"), f"{at}/items", within)
        for name in ("anyOf", "oneOf"):
            self._check_any(schema.get(name), f"{at}/{name}", within)
        for index, each in enumerate(schema.get("allOf", ())):
            self.check(each, f"{at}/allOf/{index}", within)

    def _check_any(self, choices: Any, at: str, within: tuple[str, ...]) -> None:
        """Raise the last choice's error if none of the choices ends."""
        errors = []
        for index, each in enumerate(choices or ()):
            try:
                return self.check(each, f"{at}/{index}", within)
            except SettingsError as error:
                errors.append(error)
        if errors:
            raise errors[-1]

    def _resolved(self, target: str) -> Any:
        """Return what a reference by its path within the schema leads to; None for others, such as an anchor."""
        if target != "#" and not target.startswith("#/"):
            return None
        found: Any = self._root
        for part in target.removeprefix("#").split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            found = found[int(name)] if isinstance(found, list) else found.get(name, {})
        return found


_RULE = re.compile(r"^[ \t]*([a-z_][a-z0-9_]*)(?:\[[^\]]*\])?[ \t]*:", re.MULTILINE)
_WORDS = re.compile(
    r"""//[^\n]*|\#[^\n]*|"(?:\\.|[^"\\])*"i?|/(?:\\.|[^/\\])+/[a-z]*|->[ \t]*\w+|(?P<word>[A-Za-z_]\w*|[()\[\]|?*+])"""
    r"""|\{[^{}]*\}|~[ \t]*\d+(?:\.\.\d+)?""",
    re.VERBOSE,
)


def check_grammar_ends(lark: str) -> None:
    """Raise SettingsError for a grammar in Lark's notation whose start contains itself in all of its alternatives."""
    rules = _rules(lark)
    ending: set[str] = set()
    while True:
        more = {name for name, words in rules.items() if name not in ending and _can_end(words, rules, ending)}
        if not more:
            break
        ending |= more
    if "start" in rules and "start" not in ending:
        raise SettingsError(
            "--grammar cannot end: each alternative of start, or of GBNF's root, contains a rule that contains itself",
            "give an alternative without it",
        )


def _rules(lark: str) -> dict[str, list[str]]:
    """Return the names of rules, parentheses and operators of each rule's expansion; strings and regexes are left out.

    Empty for a grammar with other parts, such as %json, which the compiler checks.
    """
    if "%json" in lark or "%lark" in lark or "%regex" in lark:
        return {}
    heads = list(_RULE.finditer(lark))
    ends = [head.start() for head in heads[1:]] + [len(lark)]
    return {
        head[1]: [found["word"] for found in _WORDS.finditer(lark, head.end(), end) if found["word"]]
        for head, end in zip(heads, ends, strict=True)
    }


def _can_end(words: Sequence[str], rules: Mapping[str, Any], ending: set[str]) -> bool:
    """Return whether an expansion has an alternative whose rules all end, or may be left out."""
    stack: list[list[list[bool]]] = [[[]]]  # by depth: alternatives, each with its parts
    for word in words:
        if word in "([":
            stack.append([[]])
        elif word in ")]" and len(stack) > 1:
            ends = any(map(all, stack.pop()))
            stack[-1][-1].append(ends or word == "]")
        elif word == "|":
            stack[-1].append([])
        elif word in "?*" and stack[-1][-1]:
            stack[-1][-1][-1] = True
        elif word not in rules or word == "+":
            stack[-1][-1].append(True)
        else:
            stack[-1][-1].append(word in ending)
    return any(map(all, stack[0]))
