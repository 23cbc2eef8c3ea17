"""Fits a conversation's documents to the context before it begins: a longer model, a truncation that is said, or not.

As for `generate` and `summarize`, nothing is left out where a model was chosen, unless --truncate asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from offload.settings.method_sizes import forgets

from ..input.documents import Document
from ..input.excerpts import GAP, MIDDLE, Truncated
from ..output.renderers import StreamRenderer, tokenizing
from ..run.long_prompts import (
    Commands,
    Notices,
    is_model_chosen,
    reason,
    refusal,
    room,
    short,
    too_long,
    truncated,
    with_longer_model,
)
from ..run.model_request import ModelRequest
from .conversation import Conversation

_ANY_QUESTION = "?"
_FREE = 4  # of the context, for questions and answers beside truncated documents: 1/4
_JOINED = 8  # tokens by which a document in a conversation may exceed the document alone


def prompt_tokens(conversation: Conversation, opened: ModelRequest, renderer: StreamRenderer) -> int:
    """Return the tokens of a conversation with the shortest question."""
    messages, progress = conversation.messages(_ANY_QUESTION), tokenizing(renderer)
    return len(opened.model.tokenizer.chat_turns(messages, progress, think=opened.think))


def fit_documents(
    conversation: Conversation, opened: ModelRequest, notices: Notices
) -> tuple[ModelRequest, Conversation]:
    """Return the request and the conversation that fits: as it is, with a longer model, or with truncated documents.

    Raises PromptError where a model was chosen and --truncate was not given.
    """
    request, waiting = opened.request, conversation.waiting
    tokens = prompt_tokens(conversation, opened, notices.renderer)
    is_kept = is_model_chosen(request) and request.truncate is None
    fits = tokens <= (opened.context - 1 if is_kept else room(opened))
    if fits or not waiting or forgets(opened.settings.speculation):
        return opened, conversation
    names, wanted = ", ".join(each.name for each in waiting), tokens + opened.settings.generation.max_new_tokens
    commands = Commands(request, names)
    if is_kept:
        raise refusal(too_long(opened, tokens), commands, wanted, notices.terminal)
    if request.truncate is None and (longer := with_longer_model(opened, wanted, short(names), notices)) is not None:
        return longer, conversation
    conversation = _without_known(conversation)
    rest = prompt_tokens(replace(conversation, waiting=()), opened, notices.renderer)
    cuts = _cut(conversation.waiting, opened, min(room(opened), opened.context - opened.context // _FREE) - rest)
    why = "" if request.truncate else reason(opened, commands, wanted, notices.terminal)
    for cut in cuts.values():
        notices.truncated(cut, why, request.dry_run)
    kept = [replace(each, text=cuts[i].text) if i in cuts else each for i, each in enumerate(conversation.waiting)]
    return opened, replace(conversation, waiting=tuple(kept))


def _cut(documents: Sequence[Document], opened: ModelRequest, left: int) -> dict[int, Truncated]:
    """Return what is left of the documents that are cut, by their indices, so that all take `left` tokens.

    Short ones stay whole, and the others are cut to equal lengths.
    """
    tokenizer, dropped = opened.model.tokenizer, opened.request.truncate or MIDDLE
    encode = partial(tokenizer.encode, special_tokens=False)
    counts = [len(encode(each.text)) + _JOINED for each in documents]
    cuts: dict[int, Truncated] = {}
    for done, index in enumerate(sorted(range(len(counts)), key=counts.__getitem__)):
        share, taken = left // (len(counts) - done), counts[index]
        if taken > share:
            name, text = documents[index].name, documents[index].text
            cuts[index], ids = truncated(opened, name, text, dropped, max(share - _JOINED, 0), encode)
            taken = len(ids) + _JOINED
        left -= taken
    return cuts


def _without_known(conversation: Conversation) -> Conversation:
    """Return the conversation without the documents of which a saved one already has the part that was kept."""
    known = [document for turn in conversation.turns for document in turn.documents]

    def is_known(document: Document) -> bool:
        same = (each for each in known if each.name == document.name)
        return any(all(piece in document.text for piece in each.text.split(GAP)) for each in same)

    return replace(conversation, waiting=tuple(each for each in conversation.waiting if not is_known(each)))
