"""A conversation as data, in files, and what completes its commands: without a model."""

import json

import pytest

from offload.errors import PromptError, TriforceError
from triforce_cli.chat.conversation import Conversation, load_conversation, save_conversation
from triforce_cli.input.documents import Document

BOOK, LETTER = Document("/book.txt", "The book.\n"), Document("/letter.txt", "Dear é,")


@pytest.fixture
def conversation():
    return (
        Conversation("Be brief.")
        .added(BOOK)
        .answered("Who?", "I", (1, 2))
        .added(LETTER)
        .answered("To whom?", "Thou", None)
    )


def test_messages_hold_the_documents_before_their_questions(conversation):
    messages = conversation.messages("And then?")
    assert [(each.role, each.content, each.ids) for each in messages] == [
        ("system", "Be brief.", None),
        ("user", "The book.\n\nWho?", None),
        ("assistant", "I", (1, 2)),
        ("user", "Dear é,\n\nTo whom?", None),
        ("assistant", "Thou", None),
        ("user", "And then?", None),
    ]


def test_documents_stay_when_questions_go(conversation):
    assert conversation.documents == [BOOK, LETTER]
    undone = conversation.undone()
    assert undone.waiting == (LETTER,) and [turn.question for turn in undone.turns] == ["Who?"]
    assert undone.undone().waiting == (BOOK, LETTER)
    assert conversation.cleared() == Conversation("Be brief.", (), (BOOK, LETTER))
    with pytest.raises(PromptError):
        conversation.cleared().undone()


def test_a_file_holds_all_of_it_for_its_owner_alone(conversation, tmp_path):
    path = tmp_path / "saved.json"
    path.write_text("an older file, which others may read")
    save_conversation(path, conversation.added(BOOK))
    assert load_conversation(path) == conversation.added(BOOK)
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(TriforceError, match="cannot be saved"):
        save_conversation(tmp_path / "no" / "such.json", conversation)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda saved: [], "not a saved conversation"),
        (lambda saved: saved | {"version": 1}, "version"),
        (lambda saved: saved | {"turns": None}, "not a saved conversation"),
        (lambda saved: saved | {"system": 1}, "1 is not text"),
        (lambda saved: saved | {"waiting": [{"name": "a"}]}, "text"),
        (lambda saved: saved | {"turns": [saved["turns"][0] | {"answer": None}]}, "not a saved conversation"),
        (lambda saved: saved | {"turns": [saved["turns"][0] | {"question": "\ud800"}]}, "surrogate"),
        (lambda saved: saved | {"turns": [saved["turns"][0] | {"ids": ["a"]}]}, "not a saved conversation"),
    ],
)
def test_a_file_of_something_else_is_refused(conversation, tmp_path, change, words):
    path = tmp_path / "saved.json"
    save_conversation(path, conversation)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(PromptError, match=words) as caught:
        load_conversation(path)
    assert "/save" in caught.value.hint
    path.write_bytes(b"\xff{")
    with pytest.raises(PromptError, match="not a saved conversation"):
        load_conversation(path)
