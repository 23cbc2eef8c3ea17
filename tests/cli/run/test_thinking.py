"""Reasoning models: thinking is on stderr, or where it is asked for; the answer alone is on stdout."""

import json
import shutil

import pytest
import torch

from tests.support.command import assert_error
from tests.support.models import TEMPLATE, make_hf_model, make_tokenizer

GREEDY = ("-n", "24", "--temperature", "0", "--no-cache")
ASK = ("generate", "Are you there?", *GREEDY)
SWITCH = "{% if enable_thinking is defined %}{{ 'on' if enable_thinking else 'off' }}{% endif %}"


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    """A model that answers every chat with `<think>ok?</think>Yes.`: each token follows from the one before."""
    folder = tmp_path_factory.mktemp("thinker")
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])  # not special, as in Qwen3
    tokenizer.chat_template = TEMPLATE + "{# thinks between <think> and </think> #}"
    chain = tokenizer("\n<think>ok?</think>Yes.<|im_end|>")["input_ids"]
    assert len(set(chain)) == len(chain)
    model = make_hf_model("llama", vocab_size=len(tokenizer), tie_word_embeddings=False)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight[chain[1:]] = 10 * model.model.embed_tokens.weight[chain[:-1]] / model.model.norm.weight
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def ask(triforce, thinker):
    """`ask(*args, command=ASK) -> Answer` of that model."""
    return lambda *args, command=ASK: triforce(*command, "--model", thinker, *args)


def test_the_answer_alone_is_on_stdout(ask):
    found = ask()
    assert (found.returncode, found.stdout) == (0, "Yes.\n")
    assert found.stderr.startswith("ok?\n\n") and "9 written (5 of thinking)" in found.stderr
    assert ask("-q") == (0, "Yes.\n", "")
    shown = ask("--show-thinking")
    assert shown.stdout == "<think>\nok?\n</think>\n\nYes.\n" and "ok?" not in shown.stderr


def test_thinking_has_its_own_events(ask):
    lines = [json.loads(line) for line in ask("--json").stdout.splitlines()]
    texts = [(line["type"], line["text"]) for line in lines if line["type"] in ("thinking", "text")]
    assert "".join(text for kind, text in texts if kind == "thinking") == "ok?"
    assert "".join(text for kind, text in texts if kind == "text") == "Yes."
    done = lines[-1]
    assert (done["thinking_tokens"], done["new_tokens"], done["settings"]["think"]) == (5, 9, "auto")


def test_raw_text_is_as_the_model_writes_it(ask):
    assert ask(command=("generate", "Hi\n", "--raw", *GREEDY)).stdout == "<think>ok?</think>Yes.\n"


def test_a_stop_string_is_looked_for_in_the_answer(ask):
    assert ask("--stop", "k", "--stop", "s").stdout == "Ye\n"


def test_summaries_and_batches_are_answers_alone(ask, tmp_path):
    (prompts := tmp_path / "prompts.jsonl").write_text('{"prompt": "Are you there?"}')
    batch = ("generate", "--batch", prompts, "-q", *GREEDY)
    (result,) = map(json.loads, ask(command=batch).stdout.splitlines())
    assert (result["text"], result["thinking_tokens"], result.get("thinking")) == ("Yes.", 5, None)
    (result,) = map(json.loads, ask("--show-thinking", command=batch).stdout.splitlines())
    assert (result["text"], result["thinking"]) == ("Yes.", "ok?")
    (book := tmp_path / "book.txt").write_text("A short story.")
    found = ask(command=("summarize", book, *GREEDY))
    assert found.stdout == "Yes.\n" and found.stderr.startswith("ok?\n\n")
    (other := tmp_path / "other.txt").write_text("Another story.")
    found = ask(command=("summarize", book, other, "--parallel", "2", *GREEDY))
    assert (found.stdout.count("Yes.\n"), found.stdout.count("ok?"), found.stderr.count("ok?\n\n")) == (2, 0, 2)


def test_the_switch_is_passed_to_the_template(triforce, thinker, tmp_path):
    shutil.copytree(thinker, folder := tmp_path / "switched")
    (folder / "chat_template.jinja").write_text(TEMPLATE + SWITCH, "utf-8")
    command = (*ASK, "--json", "--model", folder)
    answers = [triforce(*command, *more) for more in ((), ("--think", "auto"), ("--think", "on"), ("--think", "off"))]
    left, auto, on, off = (json.loads(found.stdout.splitlines()[-1])["prompt_tokens"] for found in answers)
    assert (auto, on, off) == (left, left + 1, left + 3)  # tokens of `on` and `off`
    lines = [{"prompt": ASK[1]}, {"prompt": ASK[1], "think": "on"}, {"prompt": ASK[1], "think": "hard"}]
    lines.append({"prompt": ASK[1], "think": "on", "raw": True})
    (prompts := tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    batch = triforce("generate", "--batch", prompts, *GREEDY, "--model", folder, "--think", "off")
    found = {each["line"]: each for each in map(json.loads, batch.stdout.splitlines())}
    assert (found[1]["prompt_tokens"], found[2]["prompt_tokens"]) == (off, on)
    assert found[3]["message"] == "think is 'hard'" and "contradict" in found[4]["message"]
    assert_error(triforce(*ASK, "--think", "off"), 2, "no switch for thinking", "leave it out")
