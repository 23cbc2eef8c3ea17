"""Map-reduce over documents longer than the context: finished parts on disk, and resuming from them."""

import json
import re
import stat
from types import SimpleNamespace

import pytest

from offload.errors import PromptError
from triforce_cli.input.documents import Document
from triforce_cli.output.turns import Section
from triforce_cli.run.generation import Generation
from triforce_cli.summarize import map_reduce
from triforce_cli.summarize.finished_parts import FinishedParts
from triforce_cli.summarize.instructions import AnswerStyle, load_templates

BOOK = "\n\n".join(f"Chapter {i}. The cat went to the {i}th house and said what it had seen there." for i in range(150))
ARGS = ("--temperature", "0", "-n", "24")


@pytest.fixture
def book(tmp_path):
    (tmp_path / "book.txt").write_text(BOOK)
    return tmp_path / "book.txt"


def finished_parts(home):
    return sorted((home / "parts").glob("*")) if (home / "parts").exists() else []


def parts_of(out):
    return [event for line in out.splitlines() if (event := json.loads(line))["type"] == "part"]


def test_parts_then_their_notes(triforce_here, book, tmp_path):
    code, out, err = triforce_here("summarize", book, *ARGS)
    assert code == 0, err
    labels = re.findall(r"^book\.txt, part (\d+) of (\d+): .*tokens read", err, re.MULTILINE)
    count = int(labels[0][1])
    assert count >= 4 and labels == [(str(number), str(count)) for number in range(1, count + 1)]
    assert re.match(rf"book\.txt \([\d,]+ tokens\): read in {count} parts, in about \d+ s", err)
    assert len(err.splitlines()) == count + 4
    assert finished_parts(tmp_path / "home") == []
    found = triforce_here("summarize", book, *ARGS, "--json")[1]
    kinds = [json.loads(line)["type"] for line in found.splitlines()]
    assert (kinds[0], kinds[-1], kinds.count("part"), kinds.count("done")) == ("section", "done", count, 1)
    assert "".join(e["text"] for e in map(json.loads, found.splitlines()) if e["type"] == "text") + "\n" == out
    assert [part["taken_over"] for part in parts_of(found)] == [False] * count


PERSON = {"name": {"type": "string", "maxLength": 4}, "role": {"enum": ["hero", "other"]}}
PEOPLE = {"type": "array", "minItems": 1, "maxItems": 2}
PEOPLE |= {"items": {"type": "object", "properties": PERSON, "required": list(PERSON)}}


def test_a_table_of_who_is_in_a_long_book(triforce_here, book):
    asked = ("--question", "Who is in it?", "--json-schema", json.dumps(PEOPLE), "-n", "150", "--json")
    code, out, err = triforce_here("summarize", book, "--temperature", "0", *asked)
    assert code == 0, err
    answer = "".join(event["text"] for event in map(json.loads, out.splitlines()) if event["type"] == "text")
    texts = [part["text"] for part in parts_of(out)]
    assert len(texts) >= 3
    for text in (*texts, answer):
        table = [(row["name"], row["role"]) for row in json.loads(text)]
        assert 1 <= len(table) <= 2 and all(len(name) <= 4 and role in ("hero", "other") for name, role in table)


@pytest.fixture
def notes_taken(tmp_path):
    """Return a function that starts to take notes, a word a token, on `words`: the steps, and all filled templates."""

    def start(words):
        filled, spans = [], lambda text, progress: [match.span() for match in re.finditer(r"\S+", text)]
        request = SimpleNamespace(
            context=1000,
            settings=SimpleNamespace(generation=SimpleNamespace(max_new_tokens=100)),
            model=SimpleNamespace(tokenizer=SimpleNamespace(spans=spans)),
            encode=lambda text: filled.append(text) or text.split(),
        )
        finished = FinishedParts(tmp_path, {}, pytest.fail)
        reading = map_reduce.MapReduce(request, load_templates(), AnswerStyle(), finished, pytest.fail)
        text = " ".join(f"word{number}" for number in range(words))
        task = map_reduce.Task(Section("a", "Who?"), Document("a", text), [0] * words)
        return reading.steps(reading.divided(task, lambda done, total: None)), filled

    return start


def test_notes_that_are_no_shorter_than_the_text_are_an_error(notes_taken):
    steps, _ = notes_taken(600)
    jobs = next(steps)
    with pytest.raises(PromptError, match="not shorter"):
        steps.send(["no " * (601 // len(jobs) + 1)] * len(jobs))


def test_notes_on_notes_do_not_overlap(notes_taken):
    steps, filled = notes_taken(5000)
    first = next(steps)
    notes = [" ".join(f"note{part}.{number}" for number in range(300)) for part in range(len(first))]
    filled.clear()
    second = steps.send(notes)
    assert 1 < len(second) < len(first)
    read = [word for text in filled[-len(second) :] for word in re.findall(r"note\d+\.\d+", text)]
    assert read == " ".join(notes).split()


@pytest.mark.long
def test_notes_that_are_still_too_long_are_read_again(triforce_here, tmp_path):
    (tmp_path / "long.txt").write_text(BOOK + BOOK[:4000])
    args = ("summarize", tmp_path / "long.txt", "--temperature", "0", "-n", "300", "--json")
    code, out, err = triforce_here(*args)
    assert code == 0, err
    rounds = {part["round"] for part in parts_of(out)}
    assert rounds >= {1, 2}
    assert "of round 2: " in err


def test_an_interrupted_run_is_resumed(triforce_here, book, tmp_path, monkeypatch):
    whole = triforce_here("summarize", book, *ARGS)[1]
    generate, begun = Generation.events, []

    def interrupted(generation, engine):
        begun.append(generation)
        for number, event in enumerate(generate(generation, engine)):
            if len(begun) == 3 and number == 9:
                raise KeyboardInterrupt
            yield event

    with monkeypatch.context() as patches:
        patches.setattr(Generation, "events", interrupted)
        code, out, err = triforce_here("summarize", book, *ARGS)
    assert re.search(r"^book\.txt, part 1 of \d+: ", err, re.MULTILINE)
    assert (code, out) == (130, "")
    assert err.endswith("the finished parts are saved: run the same command again to resume after them\n")
    files = finished_parts(tmp_path / "home")
    assert len(files) == 2 and all(path.suffix == ".json" for path in files)
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE(files[0].parent.stat().st_mode) == 0o700
    other = triforce_here("summarize", book, *ARGS, "--repetition-penalty", "1.1", "--json")
    assert not any(part["taken_over"] for part in parts_of(other[1]))  # another setting is another part
    code, out, err = triforce_here("summarize", book, *ARGS, "--set", "join_timeout=31", "--json")
    assert code == 0, err
    taken = [part["taken_over"] for part in parts_of(out)]
    assert taken == sorted(taken, reverse=True) and sum(taken) == len(files)
    assert f"{len(files)} of {len(taken)} parts reused from an earlier run" in err
    assert "".join(e["text"] for e in map(json.loads, out.splitlines()) if e["type"] == "text") + "\n" == whole
    assert finished_parts(tmp_path / "home") == []


def test_finished_parts_survive_damage_and_expiry(tmp_path):
    def warned(text):
        raise AssertionError(text)

    parts = FinishedParts(tmp_path, {"model": "a"}, warned)
    parts.save([1, 2], "one — two")
    assert FinishedParts(tmp_path, {"model": "a"}, warned).find([1, 2]) == "one — two"
    assert FinishedParts(tmp_path, {"model": "b"}, warned).find([1, 2]) is None
    assert parts.find([1, 3]) is None
    (path,) = finished_parts(tmp_path)
    path.write_text('{"text": "cut o')
    assert FinishedParts(tmp_path, {"model": "a"}, warned).find([1, 2]) is None
    parts.clear()
    parts.clear()
    assert finished_parts(tmp_path) == []
    warnings = []
    (tmp_path / "file").write_text("")
    full = FinishedParts(tmp_path / "file", {}, warnings.append)
    full.save([1], "x")
    full.save([2], "y")
    assert len(warnings) == 1 and full.find([1]) is None


def test_an_instruction_that_leaves_no_room(triforce_here, book):
    code, out, err = triforce_here("summarize", book, *ARGS, "--focus", "cats and houses " * 150)
    assert (code, out) == (2, "")
    assert "leaves no room for parts" in err and "2,048" in err
