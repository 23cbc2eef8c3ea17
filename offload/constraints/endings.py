"""Refuse schemas and grammars that contain themselves without an end: an answer would run to its limit."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from ..errors import SettingsError

_MOST_LEVELS = 1 << 14  # of schemas within schemas, by references too: what the stack of `grammar` has room for, twice

_Part = tuple[str, Any]  # a schema within another one, and its place there


def check_levels(schema: Mapping[str, Any]) -> None:
    """Raise SettingsError for a schema of which a reader by recursion, through references, might exhaust its stack."""
    references, depth = _references(schema)
    if (len(references) + 1) * depth > _MOST_LEVELS:
        message = f"the JSON schema has {len(references):,} references, in up to {depth} levels, which are too many"
        raise SettingsError(message, "leave out definitions that the answer does not need")


def check_ends(schema: Mapping[str, Any]) -> None:
    """Raise SettingsError for a schema whose values all contain another one of the same schema, with its place."""
    _Endings(schema).check()


def _references(schema: Any) -> tuple[dict[str, None], int]:
    """Return what a schema refers to, and the number of objects that are within each other at most."""
    found, deepest, left = dict[str, None](), 0, [(schema, 1)]
    while left:
        value, depth = left.pop()
        if isinstance(value, dict):
            deepest = max(deepest, depth)
            if isinstance(target := value.get("$ref"), str):
                found[target] = None
            left += ((each, depth + 1) for each in value.values())
        elif isinstance(value, list):
            left += ((each, depth) for each in value)
    return found, deepest


class _Endings:
    """Which of the schemas that a schema refers to have values that end, found from those that refer to no other."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root, self._ending = root, set[str]()
        left, before = list(_references(root)[0]), -1
        while len(left) != before:  # in turn from both sides: definitions that refer to each other are mostly in order
            before = len(left)
            left = [target for target in reversed(left) if not self._ends(self._resolved(target), target)]

    def check(self) -> None:
        """Raise SettingsError if no value of the schema ends, with the place of what it contains without end."""
        schema: Any = self._root
        at, within = "", {"#"}  # `within` are the references on the way
        while not self._ends(schema):
            if (target := self._unended(schema)) is None:
                place, schema = next(parts[-1] for parts in _contained(schema) if not self._any_ends(parts))
                at += place
                continue
            if target in within:
                raise SettingsError(
                    f"the JSON schema cannot end at {at or 'its top'}: it requires another {target}, without end",
                    "let it be left out, such as by not listing it in required",
                )
            within.add(target)
            schema = self._resolved(target)

    def _ends(self, schema: Any, name: str | None = None) -> bool:
        """Return whether a schema has a value that ends, as far as is known; note that of a reference's `name`."""
        ends = self._unended(schema) is None and all(map(self._any_ends, _contained(schema)))
        if ends and name is not None:
            self._ending.add(name)
        return ends

    def _any_ends(self, parts: Iterable[_Part]) -> bool:
        return any(self._ends(schema) for _, schema in parts)

    def _unended(self, schema: Any) -> str | None:
        """Return what a schema refers to, unless that is known to end."""
        target = schema.get("$ref") if isinstance(schema, dict) else None
        return target if isinstance(target, str) and target not in self._ending else None

    def _resolved(self, target: str) -> Any:
        """Return what a reference by its path within the schema leads to; None for others, such as an anchor."""
        if target != "#" and not target.startswith("#/"):
            return None
        found: Any = self._root
        for part in unquote(target.removeprefix("#")).split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(name)] if isinstance(found, list) else found[name]
            except (LookupError, TypeError, ValueError):
                return None
        return found


def _contained(schema: Any) -> Iterator[list[_Part]]:
    """Yield what each value of a schema contains, but for references: of each list one part at least."""
    if not isinstance(schema, dict):
        return
    properties, required, least = (schema.get(name) for name in ("properties", "required", "minItems"))
    if isinstance(properties, dict) and isinstance(required, list):
        yield from ([(f"/properties/{name}", properties.get(name))] for name in map(str, required))
    if isinstance(least, int | float) and least > 0:
        yield [("/items", schema.get("items"))]
    for name in ("anyOf", "oneOf"):
        if choices := schema.get(name):
            yield [(f"/{name}/{index}", each) for index, each in enumerate(choices)]
    yield from ([(f"/allOf/{index}", each)] for index, each in enumerate(schema.get("allOf", ())))


_RULE = re.compile(r"^[ \t]*([a-z_][a-z0-9_]*)(?:\[[^\]]*\])?[ \t]*:", re.MULTILINE)
_WORDS = re.compile(
    r"""//[^\n]*|\#[^\n]*|"(?:\\.|[^"\\])*"i?|/(?:\\.|[^/\\])+/[a-z]*|->[ \t]*\w+|(?P<word>[A-Za-z_]\w*|[()\[\]|?*+])"""
    r"""|\{[^{}]*\}|~[ \t]*\d+(?:\.\.\d+)?""",
    re.VERBOSE,
)


def check_grammar_ends(lark: str) -> None:
    """Raise SettingsError for a grammar in Lark's notation whose start contains itself in all of its alternatives."""
    rules = _rules(lark)
    ending, left, before = set[str](), list(rules), -1
    while len(left) != before:  # in turn from both sides, as in `_Endings`
        before = len(left)
        ending.update(name for name in reversed(left) if _can_end(rules[name], rules, ending))
        left = [name for name in reversed(left) if name not in ending]
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
