"""`triforce profile`: what it lists, plans, compares and refuses, without torch."""

import json
import shlex
import subprocess
import sys

import pytest
from gguf import GGMLQuantizationType

from offload.loading.hub.registry import HUB_MODELS
from offload.units import GIB
from tests.support.command import assert_error, environment
from tests.support.gguf import write_gguf
from tests.support.models import make_hf_model, make_tokenizer
from triforce_cli.run import profile_plans

BF16 = ("--dtype", "bfloat16")


def test_profile_shows_a_plan_in_some_lines_or_whole(triforce):
    short = triforce("profile", "--gpu", "4090", "--model", "Llama-3.1-8B").stdout.splitlines()
    assert [line.split()[0] for line in short if line] == [
        "fits:",
        "model",
        "from",
        "reads",
        "writes",
        "placement",
        "triforce",
    ]
    assert "meta-llama/Llama-3.1-8B-Instruct: Llama 3.1 Community License; gated" in short[2]
    assert not {"staging", "mean", "host"} & set(" ".join(short[1:5]).split())
    whole = triforce("profile", "--gpu", "4090", "--model", "Llama-3.1-8B", "-v").stdout.splitlines()
    assert whole[0] == short[0] and whole[-1] == short[-1] and any(line.startswith("staging ") for line in whole)
    shown = json.loads(triforce("profile", "--gpu", "4090", "--model", "llama-2-7b-128k", "--json").stdout)
    assert shown["profile"]["name"] == "rtx-4090"
    assert shown["profile"]["gpu"]["memory_gib"] == 24
    assert shown["plan"]["fits"]
    assert shown["plan"]["context"] == 131072


def test_profile_plans_a_model_without_its_weights(triforce):
    """The printed command gives the same plan: `profile` with its flags prints the same."""
    args = ("profile", "--gpu", "2x4090", "--model", "Llama-2-13B-128K", "--context", "127K", "--memory", "22GiB", "-v")
    result = triforce(*args)
    assert (result.returncode, result.stderr) == (0, "")
    for word in ("memory on each GPU", "host memory", "KV cache", "prefill", "plain", "bound by", "130,048 tokens"):
        assert word in result.stdout
    command = shlex.split(result.stdout.splitlines()[-1])
    assert command[:3] == ["triforce", "summarize", "book.txt"]
    again = triforce("profile", *command[3:], "--context", "127K", "-v").stdout
    assert again.splitlines()[:9] == result.stdout.splitlines()[:9]
    assert again.splitlines()[-1] == result.stdout.splitlines()[-1]


def test_quantised_weights_leave_room_for_the_kv_cache(triforce):
    args = ("profile", "--gpu", "4090", "--model", "Llama-3.1-8B", *BF16)
    plain, found = (json.loads(triforce(*args, *more, "--json").stdout)["plan"] for more in ((), ("--quantize", "q4")))
    assert (plain["quantize"], plain["weight_bits"]) == (None, {"layers": 16, "outer": 16, "experts": None})
    assert (found["quantize"], found["weight_bits"]) == ("q4", {"layers": 5, "outer": 8.5, "experts": None})
    assert plain["resident_layers"] < found["resident_layers"] == found["layers"]
    assert plain["resident_tokens"] < plain["context"] < found["resident_tokens"]
    assert found["plain"]["tbt"]["seconds"] < plain["plain"]["tbt"]["seconds"] / 4
    text = triforce(*args, "--quantize", "q4", "-v").stdout
    assert "weights    rounded to q4 (--quantize): 5 bits each, 8.5 in embedding and output head\n" in text
    assert "--quantize q4" in text.splitlines()[-1]
    assert "rounded" not in triforce(*args).stdout


def test_experts_that_do_not_fit_are_planned_where_they_take_least_time(triforce):
    """The printed command gives the same plan."""
    base = ("profile", "--gpu", "4090", "--model", "gpt-oss-120b", "--context", "2K", *BF16)
    args = (*base, "--host-memory", "64GiB")
    result = triforce(*args, "-v")
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert "of 36 layers in host memory" in result.stdout
    command = shlex.split(lines[-1])
    again = triforce("profile", *command[3:], *base[5:], "-v")
    assert again.stdout == result.stdout
    plans = {
        way: json.loads(triforce(*args, "--experts", way, "--json").stdout)["plan"]
        for way in ("auto", "host", "device")
    }
    assert plans["auto"] == plans["host"] | {"flags": plans["auto"]["flags"]}
    assert plans["host"]["experts"] == "host" and 0 < plans["host"]["expert_layers"] < 36
    assert plans["device"]["experts"] == "device" and plans["device"]["weight_layers"] < 36
    assert plans["device"]["expert_layers"] == 36
    small = triforce(*base, "--host-memory", "32GiB", "--experts", "host")
    assert small.returncode == 1 and "host memory (experts 4" in small.stderr
    assert "hint: --host-memory 48GiB" in small.stderr


def test_a_gguf_file_is_planned_with_the_bits_that_it_has(triforce, tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, make_hf_model("llama"), GGMLQuantizationType.Q4_0, tokenizer=make_tokenizer())
    args = ("profile", "--gpu", "4090", "--model", path)
    bits = json.loads(triforce(*args, *BF16, "--json").stdout)["plan"]["weight_bits"]
    assert bits == {"layers": 4.5, "outer": 4.5, "experts": None}
    assert "weights    quantised: 4.5 bits each" in triforce(*args, *BF16, "-v").stdout
    assert json.loads(triforce(*args, "--dtype", "float32", "--json").stdout)["plan"]["weight_bits"]["layers"] == 32


def test_quantised_keys_and_values_are_planned_where_they_run(triforce):
    asked = ("profile", "--model", "Llama-3.2-1B", "--context", "32K", "--dtype", "bfloat16", "--kv", "q8")
    plan = json.loads(triforce(*asked, "--gpu", "cpu", "--json").stdout)["plan"]
    exact = json.loads(triforce(*asked[:-1], "bf16", "--gpu", "cpu", "--json").stdout)["plan"]
    kept, whole = (each["memory"]["device"]["parts"]["KV cache"] for each in (plan, exact))
    assert 0.5 < kept / whole < 0.6 and (plan["kv"], exact["kv"]) == ("q8", "bf16")
    assert (
        "KV cache   q8 (--kv): 8.75 bits each, which changes the answer"
        in triforce(*asked, "--gpu", "cpu", "-v").stdout
    )
    on_gpu = json.loads(triforce(*asked, "--gpu", "4090", "--json").stdout)["plan"]
    assert 0.5 < on_gpu["memory"]["device"]["parts"]["KV cache"] / whole < 0.7 and on_gpu["offload"] == "none"
    offloaded = json.loads(
        triforce(*asked, "--gpu", "4090", "--offload", "stream", "--resident-layers", "0", "--json").stdout
    )
    plan = offloaded["plan"]
    assert plan["offload"] == "stream" and 0.5 < plan["memory"]["host"]["parts"]["KV cache"] / whole < 0.7


@pytest.mark.long
def test_profile_compares_all_profiles(triforce):
    result = triforce("profile", "--compare", "--model", "llama-3.1-8b", "--context", "32K")
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "model      llama-3.1-8b, 8.0 billion parameters; 32,768 tokens of prompt and answer"
    table = lines[lines.index("") + 1 :]
    assert max(map(len, table)) <= 80
    rows = [line.split() for line in table[1:] if line]
    assert {row[0] for row in rows} >= {"a100", "rtx-4090", "2x-rtx-4090"}
    shown = json.loads(triforce("profile", "--compare", "--model", "llama-3.1-8b", "--context", "32K", "--json").stdout)
    fast = {plan["hardware"]["name"]: plan["chosen"]["tbt"]["seconds"] for plan in shown["plans"] if plan["fits"]}
    assert [row[0] for row in rows if row[0] in fast] == sorted(fast, key=fast.get)
    plans = json.loads(triforce("profile", "--compare", "--model", "llama-3.1-8b", "--json").stdout)["plans"]
    assert {plan["hardware"]["name"] for plan in plans} >= {"a100", "cpu"}


def test_a_context_beyond_the_models_own(triforce):
    args = ("profile", "--gpu", "a100", "--model", "Qwen3-8B", "--context", "128K")
    assert_error(triforce(*args), 2, "exceeds the 40,960", "--extend-context", "triforce summarize")
    line = triforce(*args, "--extend-context").stdout.splitlines()[-1]
    assert " --extend-context book.txt" in line


def test_without_a_model_the_best_free_one_is_planned(triforce_here, tmp_path, monkeypatch):
    """For a text's length; where all are slow, a part of it is planned, with the command that reads it in parts."""
    monkeypatch.setenv("TRIFORCE_MODEL", "")
    book = tmp_path / "my book.txt"
    book.write_text("The cat sat on the mat. " * 20_000)
    code, out, err = triforce_here("profile", "--gpu", "4090", book)
    lines = out.splitlines()
    assert (code, err) == (0, "") and lines[0].split() == ["to", "fetch", "size", "first", "word", "tokens/s"]
    best = lines[1].split()[0]
    assert HUB_MODELS[best].is_free and f"model      {best}, " in out and "120,512 tokens" in out
    assert shlex.split(lines[-1])[:3] == ["triforce", "summarize", str(book)]
    monkeypatch.setattr(profile_plans, "free_host_memory", lambda: 8 * GIB)
    code, out, err = triforce_here("profile", "--gpu", "cpu")
    assert (
        code == 0
        and "131,072 tokens at once take too long" in err
        and out.splitlines()[-1].startswith("triforce summarize ")
    )
    assert json.loads(triforce_here("profile", "--gpu", "a100", "--json").stdout)["plan"]["context"] == 131072


def test_a_dry_run_plans_a_known_model_that_is_not_here(triforce_here, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/nowhere")
    code, out, err = triforce_here("generate", "hi", "-m", "Qwen3-0.6B", "--dry-run")
    assert (code, err) == (0, "") and "\nmodel      Qwen3-0.6B, " in out
    assert out.splitlines()[-1].startswith("triforce generate hi -m Qwen3-0.6B --gpu cpu ")


def test_profile_refuses_what_does_not_fit_and_suggests_changes(triforce):
    args = ("profile", "--gpu", "4090", "--model", "llama-2-7b-128k", "--offload", "none")
    result = triforce(*args)
    assert result.returncode == 1
    assert "triforce summarize" not in result.stdout
    error, hint = result.stderr.splitlines()
    assert "131,072 tokens do not fit" in error
    assert "--offload auto" in hint
    shown = triforce(*args, "--json")
    assert shown.returncode == 1
    assert not json.loads(shown.stdout)["plan"]["fits"]
    assert json.loads(shown.stdout)["plan"]["ways_out"]


def test_wrong_use_of_profile(triforce):
    assert_error(triforce("profile", "--gpu", "rtx-4900"), 2, "rtx-4900", "did you mean rtx-4090")
    assert_error(triforce("profile", "--gpu", "rtx"), 2, "did you mean", "rtx-4090")
    assert_error(triforce("profile", "--gpu", "4090", "--compare"), 2, "--gpu 4090", "leave out")
    assert_error(triforce("profile", "--gpu", "a100", "--model", "llama-3.1-9b"), 2, "did you mean Llama-3.1-8B")
    assert_error(triforce("profile", "--gpu", "a100", "--model", "llama-3.1-8b", "--context", "1M"), 2, "1,048,576")
    assert_error(triforce("profile", "--context", "long"), 2, "128K")
    assert_error(triforce("profile", "--memory", "lots"), 2, "22GiB")
    assert_error(triforce("profile", env={"TRIFORCE_HOST_MEMORY": "lots"}), 2, "22GiB")
    assert_error(triforce("profile", "--set", "host_share=2"), 2, "host-share is 2")
    assert_error(triforce("profile", "--offload", "some"), 2, "offload is 'some'", "hybrid")
    args = ("profile", "--gpu", "4090", "--quantize", "q4", "--dtype", "float32")
    assert_error(triforce(*args), 2, "--quantize q4 needs bfloat16", "float32")


def test_profile_answers_without_torch(tiny_model_dir, tmp_path):
    code = (
        "import sys; sys.argv = ['triforce', 'profile', '--gpu', '4090', '--model', 'llama-2-7b-128k']\n"
        "from triforce_cli.app import run\n"
        "code = run(sys.argv[1:])\n"
        "sys.exit(code or ', '.join({'torch', 'transformers', 'numpy'} & set(sys.modules)) or 0)"
    )
    env = environment(tmp_path, tiny_model_dir)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_profile_names_a_draft_model_that_fits(triforce, tmp_path):
    args = ("profile", "--gpu", "4090", "--model", "Llama-3.1-8B", "--context", "32K")
    assert "draft      Llama-3.2-1B has the vocabulary" in triforce(*args, "-v").stdout
    assert json.loads(triforce(*args, "--json").stdout)["plan"]["draft_model"] == "Llama-3.2-1B"
    with_one = ("--method", "triforce", "--draft", "Llama-3.2-1B")
    assert json.loads(triforce(*args, *with_one, "--json").stdout)["plan"]["draft_model"] is None
    nothing = triforce(*args, "--draft", tmp_path)
    assert_error(nothing, 2, "the draft model: there is no config.json", "--draft takes a folder")
    refused = triforce(*args, "--method", "triforce", "--draft", "Llama-68M")
    assert_error(refused, 2, "Llama-68M has another vocabulary than Llama-3.1-8B", "--draft Llama-3.2-1B")
