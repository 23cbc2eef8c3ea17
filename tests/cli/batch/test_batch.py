"""`triforce generate --batch`: many prompts in a file, their results as JSON lines."""

import json
import re

import pytest

from offload.engine import Engine
from offload.errors import SettingsError
from offload.speculation.sampling.warp import Sampler
from tests.support.command import assert_error
from triforce_cli.batch.result_file import ResultFile

GREEDY = ("-n", "12", "--temperature", "0")


@pytest.fixture
def prompts(tmp_path):
    """Write a file of lines, each an object or raw text, and return its path."""

    def write(*lines, name="prompts.jsonl"):
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        (tmp_path / name).write_text("".join(f"{text}\n" for text in texts), "utf-8")
        return tmp_path / name

    return write


def parsed(text):
    return [json.loads(line) for line in text.splitlines()]


def by_id(text):
    found = {event["id"]: event for event in parsed(text)}
    assert len(found) == len(text.splitlines())
    return found


def single(triforce, *args):
    """Return the text of one run of `generate`."""
    events = parsed(triforce("generate", *args, "--json").stdout)
    return "".join(event["text"] for event in events if event["type"] == "text"), events[-1]


def test_each_text_is_that_of_a_single_run(triforce, prompts):
    file = prompts(
        {"id": "greedy", "prompt": "Once upon a time", "temperature": 0},
        {"id": 2.5, "prompt": "The cat", "seed": 7, "temperature": 0.9, "max_new_tokens": 20},
        "",
        {"prompt": "The dog", "raw": True, "temperature": 1, "top_k": 20, "seed": 3},
        {"id": "system", "prompt": "Hi", "system": "You are brief.", "temperature": 0, "repetition_penalty": 1.3},
    )
    for more in ((), ("--method", "triforce", "--budget", "16", "--set", "chunk=4", "--tree", "k-ary:2x2")):
        result = triforce("generate", "--batch", file, "-n", "12", "--parallel", "3", *more)
        assert result.returncode == 0, result.stderr
        found = by_id(result.stdout)
        assert set(found) == {"greedy", 2.5, 4, "system"} and found[4]["line"] == 4
        for id, args in {
            "greedy": ("Once upon a time", "--temperature", "0", "-n", "12"),
            2.5: ("The cat", "--seed", "7", "--temperature", "0.9", "-n", "20"),
            4: ("The dog", "--raw", "--temperature", "1", "--top-k", "20", "--seed", "3", "-n", "12"),
            "system": ("Hi", *GREEDY, "--system", "You are brief.", "--repetition-penalty", "1.3"),
        }.items():
            text, done = single(triforce, *args, *more)
            assert found[id]["text"] == text
            for name in ("prompt_tokens", "new_tokens", "finish_reason", "sampling", "method", "exact"):
                assert found[id][name] == done[name], (id, name)


def test_results_come_in_the_order_of_finishing_and_say_how_many_ran_together(triforce, prompts, endless_model_dir):
    lines = [{"id": new, "prompt": "Once", "max_new_tokens": new} for new in (30, 4, 9)]
    args = ("--model", endless_model_dir, "--temperature", "0", "--method", "ar")
    found = parsed(triforce("generate", "--batch", prompts(*lines), "--parallel", "2", *args).stdout)
    assert [event["id"] for event in found] == [4, 9, 30]
    assert all(1 <= event["batch_size"] <= 2 for event in found)
    assert found[0]["batch_size"] > found[2]["batch_size"]
    alone = triforce("generate", "--batch", prompts(*lines), "--parallel", "1", "--json", *args)
    assert [event["batch_size"] for event in parsed(alone.stdout)] == [1] * 3
    assert "3 requests done" in alone.stderr and "up to 1 sequence together" in alone.stderr
    assert {event["text"] for event in parsed(alone.stdout)} == {event["text"] for event in found}


def test_seeds_of_lines_differ_and_stop_strings_end_a_line_alone(triforce, prompts):
    whole, _ = single(triforce, "Once upon a time", "-n", "40", "--temperature", "0")
    stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
    lines = [{"id": key, "prompt": "Once upon a time", "max_new_tokens": 40} for key in range(2)]
    greedy = lines[0] | {"id": "g", "temperature": 0}
    file = prompts(*lines, greedy, greedy | {"id": "stop", "stop": [stop, "never there"]})
    found = by_id(triforce("generate", "--batch", file, "--temperature", "1").stdout)
    assert found[0]["seed"] != found[1]["seed"] and found[0]["text"] != found[1]["text"]
    assert found["g"]["text"] == whole and found["stop"]["text"] == whole[: whole.find(stop)]
    assert found["stop"]["finish_reason"] == "stop"
    same = by_id(triforce("generate", "--batch", prompts(*lines), "--temperature", "1", "--seed", "5").stdout)
    assert same[0]["text"] == same[1]["text"] and same[0]["sampling"] == "coupled"


def test_an_exception_ends_its_line_alone(triforce_here, prompts, monkeypatch):
    lines = [{"id": key, "prompt": f"Once {key}", "temperature": 0, "seed": key} for key in range(3)]
    file, args = prompts(*lines), ("-n", "9", "--parallel", "3")
    expected = by_id(triforce_here("generate", "--batch", file, *args)[1])
    made = Sampler.__init__

    def new(sampler, sampling, seed, *more, **named):
        made(sampler, sampling, seed, *more, **named)
        if seed == 1:
            sampler.choose = sampler.distribution = lambda *args, **named: [][seed]

    monkeypatch.setattr(Sampler, "__init__", new)
    code, out, err = triforce_here("generate", "--batch", file, *args, env={"TRIFORCE_DEBUG": "1"})
    found = by_id(out)
    assert code == 1 and "1 request failed; the first: line 2: IndexError" in err and "Traceback" in err
    assert (found[1]["type"], found[1]["line"]) == ("error", 2) and "this is a bug" in found[1]["hint"]
    assert all(found[key]["text"] == expected[key]["text"] for key in (0, 2))


def test_a_bad_line_is_an_error_event_and_the_others_go_on(triforce, prompts, tmp_path):
    good = {"id": "good", "prompt": "Once"}
    nulls = dict.fromkeys(("system", "raw", "think", "temperature", "top_k", "stop", "seed", "json_schema", "choices"))
    bad = [
        ("{not json", None, "not valid JSON"),
        ('["a"]', None, "not a JSON object"),
        ({"id": "x", "promt": "a"}, "x", "unknown key 'promt'"),
        ({"id": "y", "prompt": 3}, "y", "prompt is 3"),
        ({"id": "z", "prompt": " \n"}, "z", "the prompt is empty"),
        ({"id": True, "prompt": "a"}, None, "id is true"),
        ({"id": "good", "prompt": "a"}, "good", "line 1 has the same id"),
        ({"prompt": "a", "temperature": -1}, 9, "temperature is -1"),
        ({"prompt": "a", "top_k": 1.5}, 10, "top_k is 1.5"),
        ({"prompt": "a", "stop": [1]}, 11, "stop is [1]"),
        ({"prompt": "a", "max_new_tokens": 10**6}, 12, "context"),
        ({"prompt": "long " * 4000}, 13, "context"),
        ({"prompt": "a", "raw": True, "system": "b"}, 14, "contradict"),
        ('{"prompt": "\\ud800"}', None, "surrogate"),
        ('{"prompt": NaN}', None, "NaN"),
        ({"id": None, "prompt": None}, 17, "there is no prompt"),
        ({"prompt": "a", "choices": ["b", None, True]}, 18, "choices is ['b', null, true]"),
        ({"prompt": "a", "json_schema": {"type": "txt"}}, 19, "at its top: Invalid type"),
        ({"prompt": "a", "regex": "a", "choices": ["b"]}, 20, "contradict each other"),
    ]
    file = prompts(good, *(line for line, _, _ in bad), {"id": "last", "prompt": "Then", **nulls})
    result = triforce("generate", "--batch", file, *GREEDY, "--parallel", "2")
    assert result.returncode == 1
    assert f"error: {len(bad)} requests failed; the first: line 2: not valid JSON" in result.stderr
    events = parsed(result.stdout)
    errors = {event["line"]: event for event in events if event["type"] == "error"}
    for line, (_, id, message) in enumerate(bad, 2):
        assert errors[line]["id"] == id and message in errors[line]["message"] and errors[line]["hint"]
    assert {event["id"] for event in events if event["type"] == "result"} == {"good", "last"}
    (tmp_path / "latin.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\n{"prompt": "caf\xe9"}\n')
    latin = parsed(triforce("generate", "--batch", tmp_path / "latin.jsonl", *GREEDY).stdout)
    assert [(event["type"], event["line"]) for event in latin] == [("error", 3), ("result", 1)]
    assert "UTF-8" in latin[0]["message"]


def test_a_run_is_resumed_from_its_output(triforce, prompts, tmp_path):
    lines = [{"id": key, "prompt": f"Tell {key}"} for key in ("a", 2, "2")]
    out = tmp_path / "out.jsonl"
    first = triforce("generate", "--batch", prompts(*lines[:2], "broken"), "-o", out, *GREEDY)
    assert first.returncode == 1 and first.stdout == "" and len(parsed(out.read_text())) == 3
    whole = out.read_bytes()
    out.write_bytes(whole + b'{"type": "result", "id": "2", "line": 3, "te')
    again = triforce("generate", "--batch", prompts(*lines), "--output", out, *GREEDY)
    assert again.returncode == 0
    assert "cut" in again.stderr and "2 of 3 requests have a result already" in again.stderr
    assert out.read_bytes().startswith(whole)
    (added,) = parsed(out.read_bytes()[len(whole) :].decode())
    assert (added["type"], added["id"], added["text"]) == ("result", "2", single(triforce, "Tell 2", *GREEDY)[0])
    before = out.read_bytes()
    changed = triforce("generate", "--batch", prompts({"id": "a", "prompt": "Changed"}), "-o", out, *GREEDY)
    assert changed.stderr.startswith("1 of 1 requests has a result already: not run again, even if a prompt")
    assert changed.returncode == 0 and out.read_bytes() == before
    repeated = triforce("generate", "--batch", prompts(*lines, {"id": 2, "prompt": "Another"}), "-o", out, *GREEDY)
    assert repeated.returncode == 1 and "3 of 4 requests have a result already" in repeated.stderr
    (error,) = parsed(out.read_bytes()[len(before) :].decode())
    assert (error["line"], error["message"]) == (4, "line 2 has the same id")


def test_a_whole_last_line_without_a_newline_is_kept(tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text('{"type": "result", "id": 1, "line": 1}')
    results = ResultFile(out, warn=pytest.fail)
    with pytest.raises(SettingsError, match="another run"):
        ResultFile(out, warn=pytest.fail)
    results.write('{"type": "error", "id": null, "line": 2}\n')
    results.close()
    assert results.finished == {1}
    assert [event["line"] for event in parsed(out.read_text())] == [1, 2]


def test_a_file_of_something_else_is_not_changed(triforce, prompts, tmp_path):
    file = prompts({"prompt": "a"})
    before = file.read_bytes()
    assert_error(triforce("generate", "--batch", file, "-o", file), 2, "are the same file")
    other = tmp_path / "other.jsonl"
    other.write_bytes(before)
    assert_error(triforce("generate", "--batch", file, "-o", other), 2, "line 1 is not a batch result")
    assert file.read_bytes() == other.read_bytes() == before
    assert_error(triforce("generate", "--batch", file, "-o", tmp_path), 2, "--output")
    assert_error(triforce("generate", "--batch", file, "-o", tmp_path / "none" / "a.jsonl"), 2, "no such file")


def test_standard_input_and_pipes(triforce, prompts):
    lines = "".join(json.dumps({"id": key, "prompt": "Once"}) + "\n" for key in "ab").encode()
    found = by_id(triforce("generate", "--batch", "-", *GREEDY, stdin=lines.removesuffix(b"\n")).stdout)
    assert set(found) == {"a", "b"}
    assert_error(triforce("generate", "--batch", "-", stdin=b" \n\n"), 2, "standard input has no requests")
    book = b"Call me Ishmael.\n\nSome years ago\n"
    assert_error(triforce("generate", "--batch", "-", stdin=book), 2, "none of the 2 lines of standard input")


def test_wrong_use(triforce, prompts, tmp_path):
    file = prompts({"prompt": "a"})
    assert_error(triforce("generate", "--batch", tmp_path / "prompts.json"), 2, "did you mean", "prompts.jsonl")
    assert_error(triforce("generate", "hi", "--batch", file), 2, "the prompt argument")
    assert_error(triforce("generate", "-f", file, "--batch", file), 2, "--prompt-file")
    assert_error(triforce("generate", "--verify", "--temperature", "0", "--batch", file), 2, "--verify")
    assert_error(triforce("generate", "hi", "--parallel", "2"), 2, "--parallel goes with --batch")
    for wrong in ("0", "-1", "many", "1e3", "99999"):
        assert_error(triforce("generate", "--batch", file, "--parallel", wrong), 2, "parallel is")


def test_an_interrupt_keeps_what_is_finished_and_says_how_to_resume(triforce, prompts, tmp_path, monkeypatch):
    file = prompts(*({"id": new, "prompt": "Once", "max_new_tokens": new} for new in (3, 12, 11)))
    out, real = tmp_path / "out.jsonl", Engine.generate_batch

    def interrupted(engine, requests, parallel):
        for event in real(engine, requests, parallel):
            yield event
            if out.read_bytes():
                raise KeyboardInterrupt

    args = ("generate", "--batch", file, "-o", out, "--temperature", "0", "--parallel", "2")
    with monkeypatch.context() as patches:
        patches.setattr(Engine, "generate_batch", interrupted)
        result = triforce(*args)
    assert result.returncode == 130 and [event["id"] for event in parsed(out.read_text())] == [3]
    assert result.stderr == "interrupted; 1 result of this run saved: run the same command again to go on\n"
    assert triforce(*args).returncode == 0
    assert set(by_id(out.read_text())) == {3, 12, 11}


def test_more_than_fit_are_refused_and_auto_takes_what_fits(triforce, prompts):
    file = prompts(*({"prompt": "a", "max_new_tokens": 2000} for _ in range(12)))
    room = ("--memory", "60MiB", "--raw")
    many = prompts(*({"prompt": "a", "max_new_tokens": 2000} for _ in range(1000)))
    refused = triforce("generate", "--batch", many, "--parallel", "1000", *room)
    assert_error(refused, 1, "not enough memory for 1000 sequences", "use --parallel")
    found = triforce("generate", "--batch", file, "--parallel", "auto", "--dry-run", "-n", "4")
    assert found.returncode == 0 and "8 run together" in found.stderr
    assert "--parallel auto" in found.stdout


def test_offloaded_keys_and_values_run_one_at_a_time(triforce, prompts):
    file = prompts({"prompt": "Once"}, {"prompt": "Twice"})
    tiers = ("--link", "25", "--offload", "stream", "--resident-layers", "1", "--profile", "cpu")
    result = triforce("generate", "--batch", file, *GREEDY, *tiers, "--parallel", "2")
    assert result.returncode == 0 and "one sequence at a time" in result.stderr
    for event in parsed(result.stdout):
        assert event["batch_size"] == 1
        assert event["text"] == single(triforce, ["Once", "Twice"][event["id"] - 1], *GREEDY)[0]


def test_a_status_line_on_a_terminal_and_none_in_a_pipe(triforce, prompts, on_a_terminal_here, tmp_path, monkeypatch):
    monkeypatch.setattr("triforce_cli.output.status_line.INTERVAL", 0.0)
    args = ("generate", "--batch", prompts(*({"prompt": "Once"} for _ in range(3))), *GREEDY, "--parallel", "2")
    code, shown = on_a_terminal_here(*args, "-o", tmp_path / "out.jsonl", env={"NO_COLOR": "1"})
    assert code == 0 and "0 of 3 done · 2 running · " in shown
    assert re.search("2 of 3 done · [0-9:]+ left · 1 running · ", shown)
    assert shown.rpartition("\x1b[K")[2].startswith("3 requests done · ")
    piped = triforce(*args)
    assert len(piped.stderr.splitlines()) == 1 and "\x1b" not in piped.stderr
    assert triforce(*args, "-q").stderr == ""
