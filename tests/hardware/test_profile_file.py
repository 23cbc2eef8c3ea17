"""Profile files: the line of every mistake, units, and files on top of others."""

import resource
import time

import pytest

from offload.errors import SettingsError
from offload.hardware import profiles
from tests.hardware.test_profiles import GOOD

TEXT = """\
name: mine
description: a test
device: cuda
gpus: 1
gpu:
  model: NVIDIA Thing
  memory_gib: 24 GiB
  bandwidth_gb_s: 1008 GB/s
  bf16_tflops: 80.5TFLOPS
link: {kind: PCIe, bandwidth_gb_s: 25, latency_us: 10 us}
host:
  cores: 8
options:
  memory: 22GiB
  host_memory: 60GB
"""


def refused(path):
    with pytest.raises(SettingsError) as caught:
        profiles.load(path)
    return caught.value


def test_numbers_may_carry_their_unit(tmp_path):
    (tmp_path / "mine.yaml").write_text(TEXT)
    profile = profiles.load(tmp_path / "mine.yaml")
    assert (profile.gpu.memory_gib, profile.gpu.bandwidth_gb_s, profile.gpu.bf16_tflops) == (24, 1008, 80.5)
    assert (profile.link.latency_us, profile.host.cores) == (10, 8)
    assert profile.options == {"memory": 22 * 2**30, "host_memory": 60 * 10**9}


@pytest.mark.parametrize(
    ("old", "new", "line", "message", "hint"),
    [
        ("24 GiB", "24 GB/s", 7, "gpu.memory_gib is '24 GB/s', not a number of GiB", "GiB"),
        ("24 GiB", "24 GB", 7, "gpu.memory_gib is '24 GB', not a number of GiB", "GiB"),
        ("24 GiB", "much GiB", 7, "gpu.memory_gib is 'much GiB', not a number of GiB", "GiB"),
        ("24 GiB", "nan GiB", 7, "gpu.memory_gib is nan", "positive"),
        ("24 GiB", ".nan", 7, "gpu.memory_gib is nan", "positive"),
        ("24 GiB", "-24", 7, "gpu.memory_gib is -24", "positive"),
        ("24 GiB", "24564", 7, "gpu.memory_gib is 24564", "no hardware has more than 1,024 GiB"),
        ("1008 GB/s", "1.008 TB/s", 8, "gpu.bandwidth_gb_s is '1.008 TB/s', not a number of GB/s", "GB/s"),
        ("memory_gib:", "memory_gb:", 7, "unknown key gpu.memory_gb", "did you mean memory_gib?"),
        ("  bf16_tflops: 80.5TFLOPS\n", "", 5, "gpu.bf16_tflops missing", ""),
        ("bandwidth_gb_s: 25", "bandwidth_gb_s: 25000", 10, "link.bandwidth_gb_s is 25000, more than", "PCIe"),
        ("10 us", "10 ms", 10, "link.latency_us is '10 ms', not a number of us", "us"),
        ("cores: 8", "cores: 0", 12, "host.cores is 0", "positive"),
        ("cores: 8", "cores: 8.5", 12, "host.cores is 8.5, not a whole number or null", ""),
        ("cores: 8", "cores: 8\n  cores: 9", 13, "host.cores is given twice", "remove one"),
        ("gpus: 1", "gpus: 1\nname: other", 5, "name is given twice", "remove one"),
        ("gpus: 1", "gpus: 2026-02-30", 4, "not valid YAML", ""),
        ("22GiB", "lots", 14, "options.memory: 'lots' is not a size", "22GiB"),
        ("22GiB", "-1", 14, "options.memory: memory is -1", ""),
        ("60GB", "60GB\n  budget: 3", 16, "options.budget: budget is 3, with chunks of 1", "4 chunks"),
        ("60GB", "60GB\n  budget: 64\n  chunk: 32", 13, "options: budget is 64, with chunks of 32", ""),
        ("device: cuda", "device: gpu", 3, "device is 'gpu'", "cpu or cuda"),
        ("gpus: 1", "gpus: 0", 4, "device is cuda, but gpus is 0", "gpus: 1"),
    ],
)
def test_an_error_names_file_line_and_key(tmp_path, old, new, line, message, hint):
    path = tmp_path / "mine.yaml"
    path.write_text(TEXT.replace(old, new))
    error = refused(path)
    assert error.message.startswith(f"{path}, line {line}: {message}")
    assert hint in error.hint


def test_a_file_extends_another(tmp_path):
    (tmp_path / "base.yaml").write_text("extends: 4090\nhost: {cores: 8, memory_gib: 64}\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine.yaml").write_text(
        "extends: ../base.yaml\nhost:\n  cores: 16\nlink: {bandwidth_gb_s: 12}\n"
    )
    profile = profiles.load(tmp_path / "sub" / "mine.yaml")
    assert profile.name == "mine"
    assert profile.gpu == profiles.load("rtx-4090").gpu
    assert profile.host == profiles.Host(memory_gib=64, cores=16)
    assert profile.link == profiles.Link("PCIe 4.0 x16", 12)


def test_the_file_with_the_bad_value_is_named(tmp_path):
    base, mine = tmp_path / "base.yaml", tmp_path / "mine.yaml"
    base.write_text("extends: rtx-4090\nhost:\n  cores: -8\n")
    mine.write_text("extends: base.yaml\nlink: {bandwidth_gb_s: 12}\n")
    assert refused(mine).message == f"{base}, line 3: host.cores is -8"
    mine.write_text("extends: base.yaml\nhost: {cores: 8}\nlink: {bandwidth_gb_s: 0}\n")
    assert refused(mine).message == f"{mine}, line 3: link.bandwidth_gb_s is 0"


@pytest.mark.parametrize(
    ("extends", "message"),
    [
        ("rtx-409", "extends is 'rtx-409': there is no profile 'rtx-409'"),
        ("absent.yaml", "extends is 'absent.yaml': cannot read"),
        ("[a]", "extends is ['a']: not text"),
        ("auto", "extends is 'auto': there is no profile 'auto'"),
        ('"a\\0.yaml"', "extends is 'a\\x00.yaml': cannot read"),
        ("mine.yaml", "extends is 'mine.yaml': the files extend each other in a cycle"),
    ],
)
def test_what_cannot_be_extended(tmp_path, extends, message):
    path = tmp_path / "mine.yaml"
    path.write_text(f"name: mine\nextends: {extends}\n")
    assert refused(path).message.startswith(f"{path}, line 2: {message}")


def test_a_cycle_of_two_files(tmp_path):
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("gpus: 1\nextends: ./a.yaml\n")
    assert refused(tmp_path / "a.yaml").message.startswith(f"{tmp_path / 'b.yaml'}, line 2: extends is")


@pytest.mark.parametrize(
    ("change", "message", "hint"),
    [
        ({"descriptoin": ""}, "unknown key descriptoin", "did you mean description?"),
        ({"gpu": GOOD["gpu"] | {"memory_gb": 24}}, "unknown key gpu.memory_gb", "did you mean memory_gib?"),
        ({"link": {"kind": "PCIe"}}, "link.bandwidth_gb_s missing", ""),
        ({"link": 25}, "link is 25, not keys and values", ""),
        ({"gpus": 1.5}, "gpus is 1.5, not a whole number", ""),
        ({"gpus": True}, "gpus is True, not a whole number", ""),
        ({"gpus": 0}, "device is cuda, but gpus is 0", "gpus: 1"),
        ({"gpus": -1}, "gpus is -1", "positive"),
        ({"name": 4090}, "name is 4090, not text", ""),
        ({"name": None}, "name is None, not text", ""),
        ({"device": "gpu"}, "device is 'gpu'", "cpu or cuda"),
        ({"device": "cpu"}, "device is cpu, but GPUs are described", ""),
        ({"host": {"memory_gib": "64"}}, "host.memory_gib is '64', not a number of GiB", ""),
        ({"host": {"memory_gib": 0}}, "host.memory_gib is 0", "positive"),
        ({"host": {"memory_gib": float("nan")}}, "host.memory_gib is nan", "positive"),
        ({"host": {"memory_gib": float("inf")}}, "host.memory_gib is inf", "positive"),
        ({"options": None}, "options is None, not keys and values", ""),
        ({"options": {"prefil_chunk": 1}}, "unknown key options.prefil_chunk", "did you mean prefill_chunk?"),
        ({"options": {"max-new-tokens": 1}}, "unknown key options.max-new-tokens", "did you mean max_new_tokens?"),
        ({"options": {"stop": ["x"]}}, "unknown key options.stop", ""),
        ({"options": {1: 2}}, "unknown key options.1", ""),
        ({"options": {"prefill_chunk": "big"}}, "options.prefill_chunk is 'big', not a whole number", ""),
        ({"options": {"top_k": 1.0}}, "options.top_k is 1.0, not a whole number", ""),
        ({"options": {"temperature": True}}, "options.temperature is True, not a number", ""),
        ({"options": {"seed": "x"}}, "options.seed is 'x', not a whole number or null", ""),
        ({"options": {"top_p": 1.5}}, "options.top_p: top-p is 1.5", ""),
        ({"options": {"dtype": "int8"}}, "options.dtype: dtype is 'int8'", "bfloat16"),
    ],
)
def test_an_error_names_file_and_key(written, change, message, hint):
    path = written(GOOD | change)
    with pytest.raises(SettingsError) as caught:
        profiles.load(path)
    assert caught.value.message.startswith(f"{path}, line ")
    assert caught.value.message.partition(": ")[2].startswith(message)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x\ndevice: [cuda\ngpus: 1\n", "mine.yaml, line 3: not valid YAML"),
        ("name: x\n\tgpus: 1\n", "mine.yaml, line 2: not valid YAML"),
        ("name: \x07\n", "mine.yaml, line 1: not valid YAML"),
        ("name: !!python/object/apply:os.getcwd []\n", "mine.yaml, line 1: not valid YAML"),
        ("", "mine.yaml, line 1: the file is None, not keys and values"),
        ("- cpu\n", "mine.yaml, line 1: the file is ['cpu'], not keys and values"),
        ("name: x\ngpus: !!timestamp foo\n", "mine.yaml, line 2: not valid YAML"),
        ("name: x\ngpus: !!bool maybe\n", "mine.yaml, line 2: not valid YAML"),
        ("gpu: &x {model: *x}\n", "mine.yaml, line 1: not valid YAML"),
        ("[" * 5000, "mine.yaml: not valid YAML"),
        ("extends: cpu\n<<: {gpus: 1}\n", "mine.yaml, line 2: unknown key <<"),
        ("name: x\n", "mine.yaml, line 1: description, device missing"),
    ],
)
def test_an_invalid_profile_is_refused(written, text, message):
    with pytest.raises(SettingsError) as caught:
        profiles.load(written(text))
    assert message in caught.value.message
    assert "\n" not in caught.value.message


def aliases(key, depth=30):
    """YAML whose value for a key would be 9^30 values long, were its aliases written out."""
    lines = ["a0: &a0 [x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, depth)]
    return "\n".join(lines) + f"\n{key}: *a{depth - 1}\n"


MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 30))


@pytest.mark.long
@pytest.mark.parametrize("text", [aliases("name"), aliases("gpu"), aliases("? *a5"), MERGES, aliases("extends")])
def test_aliases_are_not_expanded(written, text):
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    error = refused(written(text))
    assert "values with its aliases expanded" in error.message
    assert len(error.message) < 500 and time.process_time() - began < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB


def test_a_few_aliases_are_fine(written):
    text = "name: &x mine\ndescription: *x\ndevice: cpu\noptions: {prefill_chunk: &n 64, sink: *n}\n"
    assert profiles.load(written(text)).options == {"prefill_chunk": 64, "sink": 64}


@pytest.mark.parametrize(
    "text",
    [
        *(f"{key}: [{', '.join(['x' * 50] * 900)}]\n" for key in ("name", "gpu", "gpus", "extends", "options")),
        *(f"{key}: {'x' * 60_000}\n" for key in ("gpu", "gpus", "extends", "host", "x")),
        f"{'x' * 1000}: 1\n",
        f"extends: cpu\nhost: {{{'x' * 1000}: 1}}\n",
        f"extends: cpu\nhost: {{memory_gib: {'x' * 60_000}}}\n",
        f"extends: cpu\nhost: {{cores: 0x{'f' * 60_000}}}\n",
        f"extends: cpu\nhost: {{cores: {'9' * 3000}}}\n",
        f"extends: cpu\noptions: {{memory: {'9' * 3000}GiB}}\n",
        f"extends: cpu\noptions: {{max_new_tokens: {'9' * 3000}}}\n",
        f"extends: cpu\noptions: {{dtype: {'x' * 3000}}}\n",
        f"extends: cpu\noptions: {{prefill_chunk: 0x{'f' * 60_000}}}\n",
        f"name: {'x' * 70_000}\n",
    ],
    ids=lambda text: text[:40],
)
def test_values_in_messages_are_cut(written, text):
    error = refused(written(text))
    assert len(error.message) + len(error.hint) < 1500 and "\n" not in error.message
