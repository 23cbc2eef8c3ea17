"""`triforce chat` over a pipe, and as JSON: the answers are those of `generate`, and nothing is lost unasked."""

import json

import pytest

from offload import EngineConfig, GenerationConfig, Sampling, open_model
from offload.events import Tokens
from offload.loading.tokenizers.chat_template import ASSISTANT, USER, ChatMessage
from tests.support.command import assert_error
from triforce_cli.output.renderers import Renderer

TEXT = "The end of the other thing was in the hat of the one that went to the other end. " * 4


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def chat(triforce, book):
    """Return a function that asks about the book: `chat("Who?", "/stats", "-n", "8", stdin lines...)`."""

    def call(*lines, args=("-f", book), tokens=12, sampling=("--temperature", "0"), env=()):
        more = ("-n", tokens, *sampling)
        return triforce("chat", *args, *more, stdin="".join(f"{line}\n" for line in lines).encode(), env=env)

    return call


def events(result, kind=None):
    found = [json.loads(line) for line in result.stdout.splitlines()]
    return [event for event in found if kind in (None, event["type"])]


def texts(result):
    """Return the text of each answer."""
    found = []
    for event in events(result):
        if event["type"] == "question":
            found.append("")
        elif event["type"] == "text":
            found[-1] += event["text"]
    return found


def test_answers_are_those_of_the_same_messages_read_anew(chat, triforce, book, tiny_model_dir, tmp_path):
    path, sampling = tmp_path / "saved.json", ("--seed", "3")
    result = chat("Who?", "And then?", args=("-f", book, "--json", "--session", path), sampling=sampling)
    assert result.returncode == 0, result.stderr
    first, second = texts(result)
    assert f"{first}\n" == triforce("generate", "-f", book, "Who?", "-n", "12", *sampling, stdin=None).stdout

    ids = tuple(json.loads(path.read_text())["turns"][0]["ids"])
    opened = open_model(EngineConfig(model=str(tiny_model_dir), dtype="float32", device="cpu"))
    asked = ChatMessage(USER, TEXT + "\n\nWho?")
    prompt = opened.tokenizer.chat_turns([asked, ChatMessage(ASSISTANT, first, ids), ChatMessage(USER, "And then?")])
    generated = opened.load().generate(prompt, Sampling(coupled=True), GenerationConfig(max_new_tokens=12, seed=3))
    expected = [token for event in generated if isinstance(event, Tokens) for token in event.ids]
    assert opened.tokenizer.decode(expected) == second

    done = events(result, "done")
    before = done[0]["prompt_tokens"] + done[0]["new_tokens"]
    assert done[1]["prompt_tokens"] == len(prompt)
    assert done[1]["cached_tokens"] == before - 1  # the last token of an answer has not been run
    assert done[1]["computed_tokens"] == len(prompt) - before + 1
    assert [event["text"] for event in events(result, "question")] == ["Who?", "And then?"]


def test_commands_and_wrong_lines_over_a_pipe(chat, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("Another text, about the inn.")
    lines = ("Who?", f"/add {other}", "And?", "/undo", "/clear", "/help")
    wrong = ("/nope", "/undo", "/save", "/exit now", f"/add {other}", "/add no-such-file", "//Who?", "/bye", "Unasked?")
    result = chat(*lines, *wrong)
    assert result.returncode == 1 and len(result.stdout.split("\n\n")) == 3  # // begins a question with a slash
    said = ("\n2 files, 1 question\n", "\n2 files, 0 questions\n", "/undo ")
    assert all(each in result.stderr for each in said)
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    words = ("/nope", "no question yet", "needs an argument", "no argument", "already", "no-such-file")
    assert all(word in error for word, error in zip(words, errors, strict=True))


def test_what_exceeds_the_context_is_said_and_nothing_is_dropped(chat, book, tmp_path):
    path = tmp_path / "saved.json"
    args = ("-f", book, "--context", "460", "--json", "--session", path)
    long = "Why? " * 16
    result = chat("Who?", long, long, "/clear", long, args=args, tokens=20)
    assert result.returncode == 1
    (error,) = events(result, "error")
    assert "no room for an answer in the context of 460; nothing was dropped" in error["message"]
    assert all(choice in error["hint"] for choice in ("/undo", "/save FILE", "--context"))
    (turn,) = json.loads(path.read_text())["turns"]
    assert turn["question"] == long.strip() and len(turn["documents"]) == 1  # the book stays


def test_a_session_is_resumed_where_it_ended(chat, book, tmp_path):
    path = tmp_path / "saved.json"
    args = ("-f", book, "--json", "--session", path, "--cache", "--set", "prefill_chunk=128")
    env = {"TRIFORCE_CACHE": "1"}
    one_go = chat("Who?", "And then?", args=args, sampling=("--seed", "3"), env=env)
    saved = json.loads(path.read_text())
    path.write_text(json.dumps(saved | {"turns": saved["turns"][:1]}))
    resumed = chat("And then?", "/undo", args=args, sampling=("--seed", "3"), env=env)
    assert texts(resumed) == texts(one_go)[1:]
    assert any(event["type"] == "cache" and event["tokens"] >= 128 for event in events(resumed))  # KV, from disk
    assert "1 file" in events(resumed, "reply")[0]["lines"][0]  # the same book is not added again
    assert json.loads(path.read_text()) == saved
    assert path.stat().st_mode & 0o777 == 0o600


def test_save_overwrites_nothing(chat, tmp_path):
    path, text = tmp_path / "with a space.json", tmp_path / "book.txt"
    text.write_text("Alice")
    result = chat("Who?", f"/save '{path}'", f"/save '{path}'", f"/save {text}")
    assert result.stderr.count("nothing is saved: ") == 2 and text.read_text() == "Alice"
    assert len(json.loads(path.read_text())["turns"]) == 1


def test_what_cannot_begin_is_refused(triforce, book):
    assert_error(triforce("chat", "-f", "-"), 2, "standard input")
    assert_error(triforce("chat", "-f", book, "--session", book), 2, "same file")
    assert_error(triforce("chat", "--context", "1M"), 2, "context has 2,048 tokens")
    assert_error(triforce("chat", "--tensor-parallel", "2"), 2, "one GPU")
    book.write_text(TEXT * 30)
    assert_error(triforce("chat", "-f", book), 2, "no room in the model's context")


def test_an_answer_is_saved_before_its_end_is_shown(chat, tmp_path, monkeypatch):
    """Who sees the end, and kills the process, has the answer in the file."""
    path, shown, finish = tmp_path / "saved.json", [], Renderer.finish

    def finished(renderer, summary):
        shown.append(len(json.loads(path.read_text())["turns"]))
        finish(renderer, summary)

    monkeypatch.setattr(Renderer, "finish", finished)
    chat("Who?", "Where?", args=("--session", path))
    assert shown == [1, 2]
