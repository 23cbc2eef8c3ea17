"""Hardware profiles: the shipped ones, how they are found, and what is said about a wrong one."""

import subprocess
import sys
from dataclasses import FrozenInstanceError, asdict, fields, replace

import pytest
import yaml

from offload import profile as profiles
from offload.config import EngineConfig, GenerationConfig, Sampling, check_part, parse_tokens, sizes_in_bytes
from offload.errors import SettingsError

GOOD = {
    "name": "mine",
    "description": "a test",
    "device": "cuda",
    "gpus": 1,
    "gpu": {"model": "NVIDIA Thing", "memory_gib": 12, "bandwidth_gb_s": 500.5, "bf16_tflops": 80},
    "link": {"kind": "PCIe 3.0 x16", "bandwidth_gb_s": 12},
    "host": {"memory_gib": None, "bandwidth_gb_s": 40, "bf16_gflops": None},
    "options": {"temperature": 0, "prefill_chunk": 1024, "dtype": "float16", "seed": 7},
}


@pytest.fixture
def written(tmp_path):
    """Writes a profile (a mapping or raw text) to a file, returns its path as text."""

    def write(content):
        path = tmp_path / "mine.yaml"
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content), "utf-8")
        return str(path)

    return write


def test_the_shipped_profiles_load_under_their_own_names():
    assert profiles.available() == ["2x-rtx-4090", "a100", "cpu", "rtx-4090"]
    for name in profiles.available():
        assert profiles.load(name).name == name


@pytest.mark.parametrize(
    ("name", "gpus", "memory", "bandwidth", "tflops"),
    [("rtx-4090", 1, 24, 1008, 165.2), ("2x-rtx-4090", 2, 24, 1008, 165.2), ("a100", 1, 80, 2039, 312)],
)
def test_data_sheet_numbers(name, gpus, memory, bandwidth, tflops):
    profile = profiles.load(name)
    assert (profile.device, profile.gpus) == ("cuda", gpus)
    gpu = profile.gpu
    assert (gpu.memory_gib, gpu.bandwidth_gb_s, gpu.bf16_tflops) == (memory, bandwidth, tflops)
    assert profile.host == profiles.Host()


def test_the_cpu_profile_knows_no_gpu():
    profile = profiles.load("cpu")
    assert (profile.device, profile.gpus, profile.gpu, profile.link) == ("cpu", 0, None, None)


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("4090", "rtx-4090"),
        ("RTX 4090", "rtx-4090"),
        ("1x4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("2x4090", "2x-rtx-4090"),
        ("2 x RTX_4090", "2x-rtx-4090"),
        ("A100", "a100"),
        ("A100-SXM4-80GB", "a100"),
        ("CPU", "cpu"),
    ],
)
def test_names_are_forgiving(asked, name):
    assert profiles.load(asked).name == name


@pytest.mark.parametrize(("asked", "suggestion"), [("4080", None), ("rtx4080", "rtx-4090"), ("a10", "a100")])
def test_an_unknown_name_lists_what_there_is(asked, suggestion):
    with pytest.raises(SettingsError, match=f"no profile '{asked}'") as caught:
        profiles.load(asked)
    assert "2x-rtx-4090, a100, cpu, rtx-4090" in caught.value.hint
    assert suggestion is None or f"did you mean {suggestion}?" in caught.value.hint


@pytest.mark.parametrize("asked", ["", "rtx", "nvidia", "90", "-", "4090d", "../profiles"])
def test_a_fragment_is_not_a_name(asked):
    with pytest.raises(SettingsError):
        profiles.load(asked)


@pytest.mark.parametrize(
    ("found", "name"),
    [
        ([], "cpu"),
        (["NVIDIA GeForce RTX 4090"], "rtx-4090"),
        (["NVIDIA GeForce RTX 4090"] * 2, "2x-rtx-4090"),
        (["NVIDIA GeForce RTX 4090"] * 3, "2x-rtx-4090"),
        (["NVIDIA A100-SXM4-80GB"], "a100"),
        (["NVIDIA A100-SXM4-80GB"] * 8, "a100"),
    ],
)
def test_the_hardware_found_picks_its_profile(found, name):
    assert profiles.matching(found).name == name


@pytest.mark.parametrize(
    "found",
    [
        ["NVIDIA H200"],
        ["NVIDIA A100-SXM4-40GB"],
        ["NVIDIA GeForce RTX 4090 Laptop GPU"],
        ["NVIDIA GeForce RTX 4090 D"],
        ["NVIDIA GeForce RTX 4090", "NVIDIA T400"],
    ],
)
def test_a_gpu_that_no_profile_knows(found):
    assert profiles.matching(found) is None


def test_a_profile_from_a_file_is_what_it_says(written, tmp_path, monkeypatch):
    profile = profiles.load(written(GOOD))
    assert asdict(profile) == GOOD
    assert yaml.safe_load(yaml.safe_dump(asdict(profile))) == GOOD
    monkeypatch.chdir(tmp_path)
    assert (
        profiles.load("mine.yaml") == profiles.load("./mine.yaml") == profiles.load(tmp_path / "mine.yaml") == profile
    )


def test_parts_may_be_absent_or_null(written):
    bare = {"name": "mine", "description": "", "device": "cuda", "gpus": 1}
    assert profiles.load(written(bare)) == profiles.load(written(bare | {"gpu": None, "link": None, "host": None}))


def test_every_option_can_be_given_a_default(written):
    options = {f.name: f.default for group in (Sampling, GenerationConfig, EngineConfig) for f in fields(group)}
    del options["stop"]
    assert profiles.load(written(GOOD | {"options": options})).options == options


def test_profiles_are_frozen_and_validated_when_built_by_hand():
    profile = profiles.load("rtx-4090")
    with pytest.raises(FrozenInstanceError):
        profile.gpus = 3
    with pytest.raises(SettingsError, match=r"gpu\.memory_gib is -1"):
        replace(profile.gpu, memory_gib=-1)


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
        ({"host": {"memory_gib": "64"}}, "host.memory_gib is '64', not a number or null", ""),
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
        ({"options": {"top_p": 1.5}}, "top-p is 1.5", ""),
        ({"options": {"dtype": "int8"}}, "dtype is 'int8'", "bfloat16"),
    ],
)
def test_a_mistake_is_told_with_the_file_and_the_key(written, change, message, hint):
    path = written(GOOD | change)
    with pytest.raises(SettingsError) as caught:
        profiles.load(path)
    assert caught.value.message.startswith(f"{path}: {message}")
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x\ndevice: [cuda\ngpus: 1\n", "mine.yaml, line 3: not valid YAML"),
        ("name: x\n\tgpus: 1\n", "mine.yaml, line 2: not valid YAML"),
        ("name: \x07\n", "mine.yaml: not valid YAML"),
        ("name: !!python/object/apply:os.getcwd []\n", "mine.yaml, line 1: not valid YAML"),
        ("", "mine.yaml: a profile is None, not keys and values"),
        ("- cpu\n", "mine.yaml: a profile is ['cpu'], not keys and values"),
        ("name: x\n", "mine.yaml: description, device missing"),
    ],
)
def test_what_is_no_profile_is_refused(written, text, message):
    with pytest.raises(SettingsError) as caught:
        profiles.load(written(text))
    assert message in caught.value.message
    assert "\n" not in caught.value.message


def test_unreadable_files_are_refused(tmp_path):
    with pytest.raises(SettingsError, match=r"cannot read .*absent\.yaml: No such file"):
        profiles.load(tmp_path / "absent.yaml")
    with pytest.raises(SettingsError, match="cannot read"):
        profiles.load(f"{tmp_path}/")
    (tmp_path / "binary.yml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsError, match="not UTF-8"):
        profiles.load(tmp_path / "binary.yml")


def test_reading_profiles_imports_nothing_heavy():
    code = (
        "import sys; from offload import profile; profile.load('4090'); profile.matching([]);"
        "sys.exit(', '.join({'torch', 'typer', 'rich', 'transformers', 'triforce_cli'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("8000", 8000), ("8,000", 8000), ("128K", 131072), ("128 k", 131072), ("1M", 1048576), ("1.5k", 1536)],
)
def test_tokens_as_people_write_them(text, tokens):
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "K", "0", "-1", "1e9", "1G", "99999999M", "12 8K"])
def test_what_is_no_number_of_tokens(text):
    with pytest.raises(SettingsError, match="no number of tokens"):
        parse_tokens(text)


def test_sizes_may_be_text_wherever_they_are_set():
    assert sizes_in_bytes({"memory": "22GiB", "host_memory": 5, "model": "1GB"}) == {
        "memory": 22 * 2**30,
        "host_memory": 5,
        "model": "1GB",
    }
    check_part({"memory": "22GiB"})
    with pytest.raises(SettingsError, match="'much' is no size"):
        check_part({"memory": "much"})
