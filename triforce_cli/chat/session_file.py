"""Conversations in files: JSON, written whole or not at all, readable by their owner alone. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from offload.errors import PromptError, TriforceError
from offload.short_repr import short_repr
from offload.system.files import Unbounded, read_bounded, remove_leftovers, replace_file
from offload.units import GIB

from ..input.documents import Document, unreadable
from .conversation import Answer, Conversation, Turn

_FORMAT, _VERSION = "triforce chat", 1
_HINT = "give a file that `/save` or --session of triforce chat has written"


def save_conversation(path: Path, conversation: Conversation, model: str) -> None:
    """Write a conversation, with the texts of its documents. Raises TriforceError; the old file is then as it was."""
    content = {"format": _FORMAT, "version": _VERSION, "model": model, **asdict(conversation)}
    target = path.resolve()
    try:
        remove_leftovers(target)
        replace_file(target, json.dumps(content, ensure_ascii=False, indent=1).encode("utf-8"), b"\n")
    except OSError as error:
        reason = error.strerror or str(error)
        raise TriforceError(f"the conversation cannot be saved in {path}: {reason}", "give another file") from error


def load_conversation(path: Path) -> Conversation:
    """Return the conversation of a file. Raises PromptError if it cannot be read or holds something else."""
    try:
        with path.open("rb", buffering=0) as file:
            content = json.loads(read_bounded(file, GIB).decode("utf-8"))
    except Unbounded as error:
        raise PromptError(f"{path} {error}", _HINT) from None
    except OSError as error:
        raise unreadable(path, error) from None
    except (ValueError, RecursionError) as error:  # also of UTF-8
        raise PromptError(f"{path} is no saved conversation: {error}", _HINT) from None
    try:
        return _conversation(content)
    except _Wrong as error:
        raise PromptError(f"{path} is no saved conversation: {error}", _HINT) from None


class _Wrong(Exception):
    """A value that a saved conversation does not have; the message names it."""


def _conversation(content: Any) -> Conversation:
    values = _fields(content, "it", {"format": str, "version": int, "turns": list, "waiting": list})
    if values["format"] != _FORMAT or values["version"] != _VERSION:
        raise _Wrong(f"it is of format {short_repr(values['format'])}, version {short_repr(values['version'])}")
    system = content.get("system")
    if system is not None and not isinstance(system, str):
        raise _Wrong(f"system is {short_repr(system)}")
    turns = tuple(_turn(turn, f"turns[{number}]") for number, turn in enumerate(values["turns"]))
    return Conversation(system, turns, _documents(values["waiting"], "waiting"))


def _turn(content: Any, where: str) -> Turn:
    values = _fields(content, where, {"question": str, "answer": dict, "documents": list})
    return Turn(
        values["question"],
        _answer(values["answer"], f"{where}.answer"),
        _documents(values["documents"], f"{where}.documents"),
    )


def _answer(content: Mapping[str, Any], where: str) -> Answer:
    values = _fields(content, where, {"text": str, "reason": str, "seed": int})
    ids = content.get("ids")
    if ids is None:
        return Answer(values["text"], None, values["reason"], values["seed"])
    if not isinstance(ids, list) or not all(type(each) is int and each >= 0 for each in ids):
        raise _Wrong(f"{where}.ids is {short_repr(ids)}")
    return Answer(values["text"], tuple(ids), values["reason"], values["seed"])


def _documents(content: list[Any], where: str) -> tuple[Document, ...]:
    kinds = {"name": str, "text": str}
    return tuple(Document(**_fields(each, f"{where}[{number}]", kinds)) for number, each in enumerate(content))


def _fields(content: Any, where: str, kinds: Mapping[str, type]) -> dict[str, Any]:
    """Return the values of the named fields, which must be of these types."""
    if not isinstance(content, dict):
        raise _Wrong(f"{where} is {short_repr(content)}")
    for name, kind in kinds.items():
        if type(content.get(name)) is not kind:
            raise _Wrong(f"{name} of {where} is {short_repr(content.get(name))}")
        if kind is str and any("\ud800" <= character <= "\udfff" for character in content[name]):
            raise _Wrong(f"{name} of {where} has half a surrogate pair, which is no character")
    return {name: content[name] for name in kinds}
