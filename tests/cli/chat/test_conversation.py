"""A conversation as data, in files, and what completes its commands: without a model."""

import json
from types import SimpleNamespace

import pytest

from offload.errors import PromptError, SettingsError, TriforceError
from triforce_cli.chat.answer_settings import PARAMETERS, parse_parameter
from triforce_cli.chat.chat_session import ids_of_text, with_known_ids
from triforce_cli.chat.commands import completions
from triforce_cli.chat.conversation import Answer, Conversation, Room, load_conversation, save_conversation
from triforce_cli.input.documents import Document

BOOK, LETTER = Document("/book.txt", "The book.\n"), Document("/letter.txt", "Dear é,")
ONE, TWO = Answer("I", (1, 2), "eos", 7), Answer("Thou", None, "stop", 8)


def with_ids(turn, ids):
    return turn | {"answer": turn["answer"] | {"ids": ids}}


@pytest.fixture
def conversation():
    return Conversation("Be brief.").added(BOOK).answered("Who?", ONE).added(LETTER).answered("To whom?", TWO)


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
    assert conversation.forgotten(1).turns[0].documents == (BOOK, LETTER)
    assert conversation.forgotten(2) == Conversation("Be brief.", (), (BOOK, LETTER))
    with pytest.raises(PromptError):
        conversation.forgotten(2).undone()


def test_a_document_goes_wherever_it_is(conversation):
    assert conversation.removed("/book.txt").documents == [LETTER]
    assert conversation.forgotten(2).removed("/letter.txt").waiting == (BOOK,)
    with pytest.raises(PromptError, match="no file /other"):
        conversation.removed("/other")


def test_a_file_holds_all_of_it_for_its_owner_alone(conversation, tmp_path):
    path = tmp_path / "saved.json"
    path.write_text("an older file, which others may read")
    save_conversation(path, conversation.added(BOOK), "tiny")
    assert load_conversation(path) == conversation.added(BOOK)
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(TriforceError, match="cannot be saved"):
        save_conversation(tmp_path / "no" / "such.json", conversation, "tiny")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda saved: [], "the file is \\[\\]"),
        (lambda saved: saved | {"version": 2}, "version 2"),
        (lambda saved: saved | {"turns": None}, "turns is None"),
        (lambda saved: saved | {"system": 1}, "system is 1"),
        (lambda saved: saved | {"waiting": [{"name": "a"}]}, "waiting.1.text missing"),
        (lambda saved: saved | {"turns": [saved["turns"][0] | {"answer": None}]}, "turns.1.answer is None"),
        (lambda saved: saved | {"turns": [saved["turns"][0] | {"question": "\ud800"}]}, "surrogate"),
        (lambda saved: saved | {"turns": [with_ids(saved["turns"][0], [True])]}, "turns.1.answer.ids.1 is True"),
    ],
)
def test_a_file_of_something_else_is_refused(conversation, tmp_path, change, words):
    path = tmp_path / "saved.json"
    save_conversation(path, conversation, "tiny")
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(PromptError, match=words) as caught:
        load_conversation(path)
    assert "/save" in caught.value.hint
    path.write_bytes(b"\xff{")
    with pytest.raises(PromptError, match="no saved conversation"):
        load_conversation(path)


def test_settings_are_parsed_by_their_option():
    assert parse_parameter("temperature", "0.3") == {"temperature": 0.3}
    assert parse_parameter("--max_new_tokens", "7") == {"max_new_tokens": 7}
    assert parse_parameter("sampling", "coupled") == {"coupled": True}
    assert parse_parameter("stop", "END") == {"stop": ("END",)}
    assert parse_parameter("stop", "none") == {"stop": ()}
    for name, value in (("seed", "1.5"), ("seed", "-1"), ("top-p", "x"), ("sampling", "best"), ("model", "other")):
        with pytest.raises(SettingsError):
            parse_parameter(name, value)
    assert len(PARAMETERS) > 10
    for name, setting in PARAMETERS.items():
        assert list(parse_parameter(name, {"sampling": "fastest"}.get(name, "1"))) == [setting]


def test_the_tokens_of_an_answer_are_those_that_were_shown():
    def decode(ids):
        return "".join(map(chr, ids))

    assert ids_of_text(b"said.", "said.", decode) == tuple(b"said.")
    assert ids_of_text(b"said. END", "said.", decode) == tuple(b"said.")  # cut at a stop string
    assert ids_of_text(b"x", "", decode) == ()
    assert ids_of_text(b"<think>", "said.", decode) is None


def test_a_saved_answer_keeps_its_tokens_only_where_they_are_the_models_of_its_text():
    tokenizer = SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)))
    checkpoint = SimpleNamespace(shape=SimpleNamespace(vocab=120))
    opened = SimpleNamespace(model=SimpleNamespace(checkpoint=checkpoint, tokenizer=tokenizer))
    conversation = Conversation()
    for text, ids in (("so", b"so"), ("so", b"no"), ("xyz", b"xyz"), ("so", None)):
        conversation = conversation.answered("Why?", Answer(text, ids and tuple(ids), "eos", 7))
    known = with_known_ids(conversation, opened)
    assert [turn.answer.ids for turn in known.turns] == [tuple(b"so"), None, None, None]
    assert [turn.answer.text for turn in known.turns] == ["so", "so", "xyz", "so"]


@pytest.mark.parametrize(
    ("tokens", "wanted", "there_are"), [(50, 20, 20), (50, 80, 50), (84, 80, 16), (85, 80, 0), (96, 4, 4), (97, 4, 0)]
)
def test_an_answer_has_at_least_sixteen_tokens_or_all_that_were_asked_for(tokens, wanted, there_are):
    assert Room(100, 100, len).answer_tokens(tokens, wanted) == there_are
    assert Room(None, 100, len).answer_tokens(tokens, wanted) == wanted  # a cache that forgets


def test_completions(tmp_path):
    (tmp_path / "a book.txt").write_text("")
    (tmp_path / "books").mkdir()
    (tmp_path / ".hidden").write_text("")
    assert [text for text, _ in completions("/s")] == ["/system", "/set", "/stats", "/save"]
    assert completions("/set temp") == [("temperature", 4)]
    assert completions("/set temperature 0") == []
    beginning = f"{tmp_path}/"
    found = [text for text, replaced in completions(f"/add {beginning}") if replaced == len(beginning)]
    assert found == [f"{tmp_path}/a book.txt", f"{tmp_path}/books/"]
    assert completions(f"/add {tmp_path}/no/such") == completions("Who /s") == completions("//s") == []
