"""Texts that are longer than the context: commands as they are typed, with a tiny model in the default one's place."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from offload.architecture.known_models import KNOWN, is_current
from offload.loading.tokenizers.tokenizer_files import load_tokenizer
from tests.support.command import refused
from triforce_cli.input.excerpts import GAP, PARTS, truncate
from triforce_cli.run import profile_plans

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


def test_without_a_question_the_end_is_read_and_a_warning_says_so(bare, book):
    code, out, err = bare("generate", "--prompt-file", book, *QUICK)
    assert code == 0 and out
    first = err.splitlines()[0]
    kept, total = numbers(first)[:2]
    assert first.startswith("warning: book.txt: ") and " tokens, the end, are read: " in first
    assert 1800 < kept < 2048 < total
    assert "`triforce generate -f book.txt 'Who tells this story?'`" in first
    assert bare("generate", "--prompt-file", book, *QUICK, "-q") == (0, out, f"{first}\n")


def test_a_question_is_answered_from_parts(bare, triforce_here, book, tiny_model_dir):
    """As `summarize` does it, whether a model was chosen or not; the answer's settings hold for the notes too."""
    asked = ("generate", "-f", book, "Who is it?", *QUICK)
    code, out, err = bare(*asked, "--json")
    assert code == 0, err
    count = len(events(out, "part"))
    assert count > 1 and not events(out, "section") and not events(out, "truncated")
    first, last = err.splitlines()[0], err.splitlines()[-1]
    assert re.match(rf"book.txt \([\d,]+ tokens\): read in {count} parts, in about .* has 2,048; --truncate", first)
    assert f"{count - 1} more part: about " in err
    assert re.match(rf"in all, with {count} parts: [\d,]+ tokens read, [\d,]+ written in ", last)
    text = "".join(event["text"] for event in events(out, "text"))
    for args, stdin in ((asked, None), (("generate", "Who is it?", *QUICK), BOOK.encode())):
        assert bare(*args, "-q", stdin=stdin) == (0, f"{text}\n", "")
    chosen = triforce_here(*asked, "--model", tiny_model_dir, "--json")
    assert chosen.returncode == 0 and events(chosen.stdout, "part")
    schema = triforce_here("generate", "-f", book, "Who?", "--json-schema", '{"enum": [1, 2]}', "-q", "--json").stdout
    assert {part["text"] for part in events(schema, "part")} <= {"1", "2"}
    assert "fits" in bare(*asked, "--dry-run").stdout


def test_a_chosen_model_is_never_given_less(triforce_here, tiny_model_dir, book):
    for chosen in ((), ("--model", tiny_model_dir)):  # the environment's, and a flag's
        done = triforce_here("generate", "-f", book, "-vv", *chosen)
        refused(done, "leaves no room", "--truncate start", "in parts: `triforce generate -f book.txt")
    line = re.search(r"without the start: `triforce (.*?)`", done.stderr)[1]
    assert "-vv" in line
    code, out, err = triforce_here(*line.split(), *QUICK)
    assert code == 0 and out, err
    assert "the end, are read" in err and "warning" not in err


def test_advice_names_models_that_read_soon_and_their_download(monkeypatch):
    sizes = {}

    def planned(inputs):
        shape = inputs.shape
        seconds, sizes[inputs.model] = shape.parameters / 1e7, shape.parameters  # 100 s for 1B
        host = SimpleNamespace(limit=1, total=0)
        return SimpleNamespace(fits=True, ttft=SimpleNamespace(seconds=seconds), inputs=inputs, host=host)

    monkeypatch.setattr(profile_plans, "_inputs_here", lambda name, *_: SimpleNamespace(model=name, shape=KNOWN[name]))
    monkeypatch.setattr(profile_plans, "make_plan", planned)
    monkeypatch.setattr(profile_plans, "corrected", lambda plan: plan)
    found = profile_plans.known_model(100_000, None, None)
    assert KNOWN[found.name].context >= 100_000 and is_current(found.name)
    assert found.download_bytes == pytest.approx(2 * sizes[found.name], rel=0.01)
    assert sizes[found.name] == max(size for name, size in sizes.items() if size <= 3e9 and is_current(name))


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
    refused(triforce_here("generate", "-f", book, "--truncate", "end", "--extend-context"), "contradict")
    refused(triforce_here("generate", "-f", book, "--truncate", "end", "-n", "2000"), "--max-new-tokens 1024")
    question = "Who is it? " * 300
    refused(triforce_here("generate", "-f", book, question, "--truncate", "end", *QUICK), "no room is left")
    fitting = triforce_here("generate", "Hello", "--truncate", "end", *QUICK, "--json")
    assert fitting.returncode == 0 and events(fitting.stdout, "truncated") == []


def test_summarize_without_any_document(triforce_here):
    refused(triforce_here("summarize", stdin=None), "no document", "triforce summarize book.txt", "cat book.txt |")


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
    done, tokens = asked(bare, book, "--session", "book.json")
    first = done.stderr.splitlines()[0]
    assert first.startswith("warning: book.txt: ") and "the start and the end, are read: " in first
    assert "answered: `triforce generate -f book.txt " in first
    (event,) = events(done.stdout, "truncated")
    assert event["kept_tokens"] == numbers(first)[0] > 1400 and tokens < 1700  # the rest is for the conversation
    resumed, longer = asked(bare, book, "--session", "book.json")
    assert events(resumed.stdout, "truncated") == [] and tokens < longer < tokens + 100


def test_chat_with_a_chosen_model_truncates_on_request_alone(triforce_here, book):
    done = triforce_here("chat", "-f", book, stdin=b"")
    refused(done, "leaves no room", "in parts: `triforce generate -f book.txt")
    line = re.search(r"^hint: without the start: `triforce chat (.*?)`$", done.stderr, re.MULTILINE)[1]
    done, _ = asked(triforce_here, *line.split())
    assert "the end, are read" in done.stderr and "warning" not in done.stderr
