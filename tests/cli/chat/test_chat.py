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

    ids = tuple(json.loads(path.read_text())["turns"][0]["answer"]["ids"])
    opened = open_model(EngineConfig(model=str(tiny_model_dir), dtype="float32", device="cpu"))
    asked = ChatMessage(USER, TEXT + "\n\nWho?")
    prompt = opened.tokenizer.chat_turns([asked, ChatMessage(ASSISTANT, first, ids), ChatMessage(USER, "And then?")])
    generated = opened.load().generate(prompt, Sampling(coupled=True), GenerationConfig(max_new_tokens=12, seed=3))
    expected = [token for event in generated if isinstance(event, Tokens) for token in event.ids]
    assert opened.tokenizer.decode(expected) == second

    done = events(result, "done")
    before = done[0]["prompt_tokens"] + done[0]["new_tokens"]
    assert done[0]["cached_tokens"] > 200  # the book was read before the first question
    assert done[1]["prompt_tokens"] == len(prompt)
    assert done[1]["cached_tokens"] == before - 1  # the last token of an answer has not been run
    assert done[1]["computed_tokens"] == len(prompt) - before + 1
    assert [event["text"] for event in events(result, "question")] == ["Who?", "And then?"]


def test_commands_over_a_pipe(chat, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("Another text, about the inn.")
    lines = [
        "Who?",
        "/files",
        "/set temperature 0.5",
        "/set",
        f"/add {other}",
        "/files",
        "/system Be brief.",
        "/system",
    ]
    result = chat(*lines, "And?", "/stats", "/forget 1", f"/remove {other}", "/undo", "/help")
    assert result.returncode == 0
    assert len(result.stdout.split("\n\n")) == 2  # two answers
    for said in (
        "temperature  0.5",
        "max-new-tokens      12",
        "other.txt  ",
        "(comes with the next question)",
        "reads the files again",
        "Be brief.",
        "2 questions answered",
        "this conversation has 2 files and 1 question",
        "this conversation has 1 file and 1 question",
        "this conversation has 1 file and 0 questions",
        "/retry",
    ):
        assert said in result.stderr, said


def test_the_context_in_use_is_that_of_the_conversation_as_it_is(chat):
    result = chat("/stats", "Who?", "/stats", "/undo", "/stats", args=("--json",))
    empty, asked, undone = (
        event["lines"][0].partition(" · ")[2] for event in events(result, "reply") if "/stats" in str(event)
    )
    assert empty == undone != asked


def test_a_wrong_line_is_an_error_and_the_others_go_on(chat):
    lines = [
        "/nope",
        "/set temperature hot",
        "/set temprature 1",
        "/set top-p 7",
        "/undo",
        "/forget x",
        "/save",
        "/quit now",
    ]
    result = chat(*lines, "/retry", "/load no-such-file", "/add no-such-file", "/remove x", "//Who?")
    assert result.returncode == 1
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    hints = [line for line in result.stderr.splitlines() if line.startswith("hint: ")]
    assert len(errors) == len(hints) == 12
    for number, words in enumerate(
        (
            "/nope",
            "'hot'",
            "temprature",
            "top-p is 7",
            "no question yet",
            "0 questions",
            "needs an argument",
            "no argument",
        )
    ):
        assert words in errors[number]
    assert "did you mean temperature" in hints[2]
    assert len(result.stdout.strip()) > 3  # // begins a question with a slash


def test_retry_draws_anew_and_undo_goes_back(chat, book):
    args = ("-f", book, "--json")
    lines = ("Who?", "/retry", "/retry", "/undo", "Who?", "/set temperature 0", "So?", "/retry", "/quit", "Unasked?")
    result = chat(*lines, args=args, sampling=("--seed", "3"))
    assert result.returncode == 0
    first, again, another, undone, greedy, same = texts(result)
    assert first == undone and len({first, again, another}) == 3
    assert [each["seed"] for each in events(result, "done")] == [3, 4, 5, 3, 3, 4]
    assert greedy == same
    assert "same answer again" in events(result, "note")[-1]["text"]


def test_what_exceeds_the_context_is_said_and_nothing_is_dropped(chat, book, tmp_path):
    path = tmp_path / "saved.json"
    args = ("-f", book, "--context", "460", "--json", "--session", path)
    long = "Why? " * 16
    short = ("/set max-new-tokens 400", "So?")
    result = chat("Who?", long, long, "/forget 2", "/retry", *short, args=args, tokens=20)
    assert result.returncode == 1
    (error,) = events(result, "error")
    assert "no room for an answer in the context of 460; nothing was dropped" in error["message"]
    for choice in ("/forget 2 drops the 2 oldest questions", f"/remove {book}", "/save FILE", "--context", "/retry"):
        assert choice in error["hint"]
    assert len(texts(result)) == 4
    assert "tokens for this answer, not 400: " in events(result, "note")[-1]["text"]
    turns = json.loads(path.read_text())["turns"]
    assert [turn["question"] for turn in turns] == [long.strip(), "So?"]
    assert len(turns[0]["documents"]) == 1  # the book stays, with the first question that is left


def test_a_question_without_room_is_forgotten_with_the_others(chat):
    result = chat("Why? " * 200, "/clear", "/retry", args=("--context", "460", "--json"))
    assert result.returncode == 1
    without_room, nothing_to_retry = events(result, "error")
    assert "no room" in without_room["message"] and "no question yet" in nothing_to_retry["message"]


def test_a_session_is_resumed_where_it_ended(chat, book, tmp_path):
    path = tmp_path / "saved.json"
    args = ("-f", book, "--json", "--session", path, "--cache")
    env = {"TRIFORCE_CACHE": "1"}
    one_go = chat("Who?", "And then?", args=args, sampling=("--seed", "3"), env=env)
    saved = json.loads(path.read_text())
    path.write_text(json.dumps(saved | {"turns": saved["turns"][:1]}))
    resumed = chat("And then?", "/files", args=args, sampling=("--seed", "3"), env=env)
    assert texts(resumed) == texts(one_go)[1:]
    assert any(event["type"] == "cache" and event["tokens"] >= 128 for event in events(resumed))  # KV, from disk
    assert len(events(resumed, "reply")[0]["lines"]) == 1  # the same book is not added again
    assert json.loads(path.read_text()) == saved
    assert path.stat().st_mode & 0o777 == 0o600


def test_save_and_load(chat, tmp_path):
    path, text = tmp_path / "with a space.json", tmp_path / "book.txt"
    text.write_text("Alice")
    lines = (
        "Who?",
        f"/save '{path}'",
        f"/save '{path}'",
        f"/save {text}",
        "/undo",
        "Where?",
        "/load none",
        f"/load {path}",
        "/clear",
        f"/load {path}",
        "/stats",
    )
    result = chat(*lines)
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert f"nothing is saved: {text} is no saved conversation" in errors[0] and text.read_text() == "Alice"
    assert "none" in errors[1]  # before a hint to save or drop what would be lost
    assert errors[2] == "error: 1 question of this conversation would be lost"
    assert "1 question answered" in result.stderr


def test_what_cannot_begin_is_refused(triforce, book):
    assert_error(triforce("chat", "-f", "-"), 2, "standard input")
    assert_error(triforce("chat", "-f", book, "--session", book), 2, "same file")
    assert_error(triforce("chat", "--context", "1M"), 2, "context has 2,048 tokens")
    assert_error(triforce("chat", "--tensor-parallel", "2"), 2, "one GPU")
    book.write_text(TEXT * 30)
    assert_error(triforce("chat", "-f", book), 2, "no room in the model's context")


def test_the_plan_of_a_conversation(chat, book):
    result = chat(args=("-f", book, "--dry-run", "--json"))
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["plan"]["context"] == 2048  # all of the model's, as it has less than 8K


def test_an_answer_is_saved_before_its_end_is_shown(chat, tmp_path, monkeypatch):
    """Who sees the end, and kills the process, has the answer in the file."""
    path, shown, finish = tmp_path / "saved.json", [], Renderer.finish

    def finished(renderer, summary):
        shown.append(len(json.loads(path.read_text())["turns"]))
        finish(renderer, summary)

    monkeypatch.setattr(Renderer, "finish", finished)
    chat("Who?", "Where?", args=("--session", path))
    assert shown == [1, 2]
