"""Texts that are longer than the context: commands as they are typed, with a tiny model in the default one's place."""

import json
import re
import shutil
from pathlib import Path

import pytest

from offload.loading.tokenizers.tokenizer_files import load_tokenizer
from tests.support.command import refused
from triforce_cli.input.excerpts import GAP, PARTS, truncate

BOOK = "\n\n".join(f"Chapter {i}. The cät went to the {i}th house — and said what it saw." for i in range(52))
QUICK = ("--temperature", "0", "-n", "8")


@pytest.fixture
def book(tmp_path, monkeypatch):
    """A book of about 3,200 tokens in the current folder."""
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text(BOOK, "utf-8")
    return "book.txt"


@pytest.fixture
def bare(triforce_here, endless_model_dir, tmp_path, monkeypatch):
    """The command with nothing configured, and a tiny default model with a context of 2,048 tokens."""
    shutil.copytree(endless_model_dir, tmp_path / "home" / "models" / "smollm2-135m-0.1.2")
    monkeypatch.delenv("TRIFORCE_MODEL")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return triforce_here


def numbers(text):
    return [int(each.replace(",", "")) for each in re.findall(r"\d[\d,]*", text)]


def events(out, kind):
    return [event for line in out.splitlines() if (event := json.loads(line))["type"] == kind]


def test_generate_goes_on_after_the_end_and_says_so(bare, book):
    code, out, err = bare("generate", "--prompt-file", book, *QUICK)
    assert code == 0 and out
    first = err.splitlines()[0]
    kept, total = numbers(first)[:2]
    assert first.startswith("warning: book.txt: ") and " tokens, the end, are read: no --model was chosen" in first
    assert 1800 < kept < 2048 < total
    assert re.search(r"or in parts: `triforce summarize --prompt-file book.txt [^`]*`", first)
    assert re.search(r"`triforce generate --prompt-file book.txt [^`]*--model \S+`", first)
    quiet = bare("generate", "--prompt-file", book, *QUICK, "-q")
    assert quiet.stdout == out and quiet.stderr.count("\n") == 1
    assert quiet.stderr.startswith(first.partition("to read all")[0])


def test_a_question_is_kept_with_both_ends(bare, book):
    code, out, err = bare("generate", "-f", book, "Who is it?", *QUICK, "--json")
    assert code == 0 and "the start and the end, are read" in err
    assert "--question 'Who is it?'" in err
    (event,) = events(out, "truncated")
    (done,) = events(out, "done")
    assert event["dropped"] == "middle" and event["document"].endswith("book.txt")
    assert event["kept_tokens"] + event["dropped_tokens"] == event["total_tokens"] == numbers(err)[1]
    assert event["kept_tokens"] < done["prompt_tokens"] <= 2040


def test_a_chosen_model_is_never_given_less(triforce_here, tiny_model_dir, book):
    model = ("--model", tiny_model_dir)
    for chosen in ((), model):  # the environment's, and a flag's
        refused(triforce_here("generate", "-f", book, *chosen), "leaves no room", "--truncate start", "--map-reduce")
        refused(triforce_here("summarize", book, *chosen), "2,048", "`triforce summarize book.txt ", " --map-reduce`")
    asked = triforce_here("generate", "-f", book, "-vv", *model).stderr
    line = re.search(r"without the start: `triforce (.*?)`", asked)[1]
    assert "-vv" in line
    code, out, err = triforce_here(*line.split(), *QUICK)
    assert code == 0 and out, err
    assert "the end, are read" in err and "warning" not in err


@pytest.mark.parametrize("dropped", PARTS)
def test_truncate_on_request(triforce_here, book, dropped):
    code, out, err = triforce_here("summarize", book, "--truncate", dropped, *QUICK, "--json")
    assert code == 0, err
    assert [event["dropped"] for event in events(out, "truncated")] == [dropped]
    kept = {"start": "the end", "middle": "the start and the end", "end": "the start"}[dropped]
    assert f"tokens, {kept}, are read" in err.splitlines()[0]
    assert triforce_here("summarize", book, "--truncate", dropped, *QUICK, "-q").stderr == ""


def test_what_truncate_does_not_go_with(triforce_here, book):
    refused(triforce_here("generate", "-f", book, "--truncate", "left"), "start (transformers' left)")
    refused(triforce_here("summarize", book, "--truncate", "end", "--map-reduce"), "contradict")
    refused(triforce_here("generate", "-f", book, "--truncate", "end", "--extend-context"), "contradict")
    refused(triforce_here("generate", "-f", book, "--truncate", "end", "-n", "2000"), "--max-new-tokens 1024")
    question = "Who is it? " * 300
    refused(triforce_here("generate", "-f", book, question, "--truncate", "end", *QUICK), "no room is left")
    fitting = triforce_here("generate", "Hello", "--truncate", "end", *QUICK, "--json")
    assert fitting.returncode == 0 and events(fitting.stdout, "truncated") == []


def test_summarize_reads_parts_of_files_and_pipes(bare, book, tmp_path):
    whole = bare("summarize", book, "-n", "8", "--temperature", "0", "--json")
    assert whole.returncode == 0, whole.stderr
    note = whole.stderr.splitlines()[0]
    parts = {event["parts"] for event in events(whole.stdout, "part")}
    assert parts == {numbers(re.search(r"read in (.*?) parts?, in about \d+", note)[1])[0]}
    assert note.startswith("book.txt (") and "no --model was chosen, and smollm2-135m has a context of 2,048" in note
    text = "".join(event["text"] for event in events(whole.stdout, "text"))
    for args, stdin in ((("-f", book), None), ((), BOOK.encode())):
        code, out, _ = bare("summarize", *args, *QUICK, "-o", "out.md", stdin=stdin)
        assert (code, out) == (0, "") and Path("out.md").read_text("utf-8").rstrip("\n") == text.rstrip("\n")


def test_summarize_without_any_document(triforce_here):
    refused(triforce_here("summarize", stdin=None), "no document", "triforce summarize book.txt", "cat book.txt |")


def test_a_model_in_the_hubs_cache_is_taken(bare, book, tiny_model_dir, tmp_path):
    folder = tmp_path / "hub" / "models--someone--long-model"
    snapshot = folder / "snapshots" / "0123"
    shutil.copytree(tiny_model_dir, snapshot)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0123")
    config = json.loads((snapshot / "config.json").read_text())
    (snapshot / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 65536}))
    tokenizer = json.loads((snapshot / "tokenizer_config.json").read_text())
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (snapshot / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"chat_template": template}))
    for args in (("generate", "-f", book), ("summarize", book)):
        code, out, err = bare(*args, *QUICK, "--json")
        assert code == 0, err
        assert "someone/long-model runs, which is in the hub's cache" in err.splitlines()[0]
        (done,) = events(out, "done")
        assert done["model"] == "someone/long-model" and done["prompt_tokens"] > 2048
        assert events(out, "part") == events(out, "truncated") == []


@pytest.mark.parametrize("dropped", PARTS)
def test_a_cut_is_between_words_and_counts_its_tokens(tiny_model_dir, dropped):
    tokenizer = load_tokenizer(tiny_model_dir)
    text = " ".join(f"{number}: Größe — naïve café, 書物は長い。" for number in range(200))
    spans = tokenizer.spans(text)
    cut, ids = truncate("a", text, spans, dropped, 500, lambda part: tokenizer.encode(f"<{part}>", True))
    assert 450 < len(ids) <= 500
    assert "\ufffd" not in cut.text and set(cut.text) <= set(text) | set(GAP)
    pieces = cut.text.split(GAP)
    assert len(pieces) == (2 if dropped == "middle" else 1)
    assert cut.kept_tokens == sum(len(tokenizer.spans(piece)) for piece in pieces)
    assert text.startswith(pieces[0]) == (dropped != "start") and text.endswith(pieces[-1]) == (dropped != "end")
    assert all(piece.split()[0] in text.split() and piece.split()[-1] in text.split() for piece in pieces)


def asked(call, *args, **more):
    """Ask a chat two questions; return its result and the tokens of its last prompt."""
    done = call("chat", *args, *QUICK, "--json", stdin=b"Who?\nWhere?\n", **more)
    assert done.returncode == 0, done.stderr
    return done, events(done.stdout, "done")[-1]["prompt_tokens"]


def test_chat_reads_both_ends_and_says_so(bare, book, tmp_path):
    done, tokens = asked(bare, "-f", book, "--session", "book.json")
    first = done.stderr.splitlines()[0]
    assert first.startswith("warning: book.txt: ") and "the start and the end, are read: no --model was chosen" in first
    assert re.search(r"`triforce chat -f book.txt [^`]*--model \S+`", first)
    assert re.search(r"or in parts: `triforce summarize -f book.txt[^`]*`", first)
    assert "--session" not in first.rpartition("in parts")[2]
    (event,) = events(done.stdout, "truncated")
    assert event["kept_tokens"] == numbers(first)[0] > 1400 and tokens < 1700  # the rest is for the conversation
    resumed, longer = asked(bare, "-f", book, "--session", "book.json")
    assert events(resumed.stdout, "truncated") == [] and tokens < longer < tokens + 100


def test_chat_with_a_chosen_model_truncates_on_request_alone(triforce_here, book):
    done = triforce_here("chat", "-f", book, stdin=b"")
    refused(done, "leaves no room", "in parts: `triforce summarize -f book.txt", "--map-reduce`")
    line = re.search(r"^hint: without the start: `triforce chat (.*?)`$", done.stderr, re.MULTILINE)[1]
    done, _ = asked(triforce_here, *line.split())
    assert "the end, are read" in done.stderr and "warning" not in done.stderr
