"""Hardware profiles: the shipped ones, how they are found, and what is said about a wrong one."""

import re
import subprocess
import sys
from dataclasses import FrozenInstanceError, asdict, fields, replace
from pathlib import Path

import pytest
import yaml

from offload.config import GROUPS
from offload.errors import SettingsError
from offload.hardware import driver as gpus
from offload.hardware import profiles
from offload.units import parse_tokens
from tests.support.paths import ROOT

GOOD = {
    "name": "mine",
    "description": "a test",
    "device": "cuda",
    "gpus": 1,
    "gpu": {"model": "NVIDIA Thing", "memory_gib": 12, "bandwidth_gb_s": 500.5, "bf16_tflops": 80},
    "link": {
        "kind": "PCIe 3.0 x16",
        "bandwidth_gb_s": 12,
        "to_host_gb_s": None,
        "pageable_gb_s": None,
        "latency_us": 10,
    },
    "host": {"memory_gib": None, "bandwidth_gb_s": 40, "bf16_gflops": None, "cores": 8, "disk_gb_s": None},
    "options": {"temperature": 0, "prefill_chunk": 1024, "dtype": "float16", "seed": 7},
}


def test_the_shipped_profiles_load_under_their_own_names():
    assert {"2x-rtx-4090", "a100", "cpu", "h100", "h200", "l40s", "rtx-3090", "rtx-4090"} < set(profiles.available())
    for name in profiles.available():
        assert profiles.load(name).name == name


def test_shipped_profiles_differ_and_have_a_source():
    """Two profiles of one GPU model must differ in their number, or `matching` could not choose."""
    models = [(p.gpu.model, p.gpus) for p in map(profiles.load, profiles.available()) if p.gpu]
    assert len(set(models)) == len(models)
    for file in (ROOT / "profiles").glob("*.yaml"):
        assert file.name == "cpu.yaml" or file.read_text("utf-8").startswith("# "), file


def test_gpus_without_bf16_run_in_float16():
    for name in ("t4", "rtx-2080-ti"):
        profile = profiles.load(name)
        assert profile.options["dtype"] == "float16"
        assert "float16" in profile.description


@pytest.mark.parametrize(
    ("name", "gpus", "memory", "bandwidth", "tflops"),
    [
        ("rtx-4090", 1, 24, 1008, 165.2),
        ("2x-rtx-4090", 2, 24, 1008, 165.2),
        ("rtx-3090", 1, 24, 936, 71),
        ("a100", 1, 80, 2039, 312),
        ("h100", 1, 80, 3350, 989.4),
        ("h200", 1, 140, 4800, 989.4),
        ("l40s", 1, 48, 864, 362.05),
        ("rtx-2080-ti", 1, 11, 616, 53.8),
        ("t4", 1, 16, 320, 65),
        ("rtx-5090", 1, 32, 1792, 209.5),
        ("rtx-5080", 1, 16, 960, 112.6),
        ("rtx-5060-ti-16gb", 1, 16, 448, 47.4),
        ("rtx-4080-super", 1, 16, 736, 104.4),
        ("rtx-4070-ti-super", 1, 16, 672, 88.2),
        ("rtx-4060-ti-16gb", 1, 16, 288, 44.1),
        ("rtx-3060", 1, 12, 360, 25.5),
        ("2x-rtx-3090", 2, 24, 936, 71),
        ("4x-rtx-4090", 4, 24, 1008, 165.2),
        ("rtx-6000-ada", 1, 48, 960, 364.2),
        ("rtx-pro-6000-blackwell", 1, 95, 1792, 503.8),
        ("l4", 1, 24, 300, 121),
        ("a10", 1, 24, 600, 125),
        ("a6000", 1, 48, 768, 154.8),
        ("b200", 1, 179, 8000, 2250),
    ],
)
def test_data_sheet_numbers(name, gpus, memory, bandwidth, tflops):
    profile = profiles.load(name)
    assert (profile.device, profile.gpus) == ("cuda", gpus)
    gpu = profile.gpu
    assert (gpu.memory_gib, gpu.bandwidth_gb_s, gpu.bf16_tflops) == (memory, bandwidth, tflops)
    assert profile.host == profiles.Host()


def test_the_cpu_profile_has_no_gpu():
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
        ("h100", "h100"),
        ("NVIDIA H200", "h200"),
        ("L40S", "l40s"),
        ("3090", "rtx-3090"),
        ("2080ti", "rtx-2080-ti"),
        ("Tesla T4", "t4"),
        ("RTX PRO 6000 Blackwell", "rtx-pro-6000-blackwell"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("4x4090", "4x-rtx-4090"),
        ("a10", "a10"),
    ],
)
def test_names_are_forgiving(asked, name):
    assert profiles.load(asked).name == name


SUGGESTIONS = [
    ("409O", "rtx-4090"),
    ("rtx509", "rtx-5090"),
    ("3o90", "rtx-3090"),
    ("h10", "h100"),
    ("l40", "l40s"),
    ("4060", "rtx-4060-ti-16gb"),
    ("atuo", "auto"),
    ("mi300x", None),
]


@pytest.mark.parametrize(("asked", "suggestion"), SUGGESTIONS)
def test_an_unknown_name_lists_the_profiles(asked, suggestion):
    with pytest.raises(SettingsError, match=f"no profile '{asked}'") as caught:
        profiles.load(asked)
    assert "a100, a6000, b200, cpu, h100" in caught.value.hint
    assert suggestion is None or f"did you mean {suggestion}?" in caught.value.hint


@pytest.mark.parametrize(
    ("asked", "meanings"),
    [
        ("6000", ["a6000", "rtx-6000-ada", "rtx-pro-6000-blackwell"]),
        ("3090", None),  # the name of one of them, beside 2x-rtx-3090
        ("rtx 50", ["rtx-5060-ti-16gb", "rtx-5080", "rtx-5090"]),
    ],
)
def test_an_ambiguous_name_lists_its_meanings(asked, meanings):
    if meanings is None:
        assert profiles.load(asked).name == "rtx-3090"
        return
    with pytest.raises(SettingsError, match=f"no profile '{asked}'") as caught:
        profiles.load(asked)
    assert caught.value.hint == f"it may mean {', '.join(meanings)}"


def test_rtx_alone_lists_every_rtx_card():
    with pytest.raises(SettingsError) as caught:
        profiles.load("rtx")
    assert "rtx-2080-ti, rtx-3060, rtx-3090, rtx-4060-ti-16gb" in caught.value.hint
    assert "a100" not in caught.value.hint


@pytest.mark.parametrize(
    ("asked", "files"),
    [
        ("cpu", {"cpu.yaml"}),
        ("4090", {"rtx-4090.yaml"}),
        ("1x RTX 4090", {"rtx-4090.yaml"}),
        ("2x4090", {"2x-rtx-4090.yaml", "rtx-4090.yaml"}),  # the one extends the other
    ],
)
def test_a_name_opens_no_other_profile(monkeypatch, asked, files):
    opened, really_open = [], Path.open
    monkeypatch.setattr(Path, "open", lambda path, *args, **more: opened.append(path.name) or really_open(path, *args))
    profiles.load(asked)
    assert set(opened) == files


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
        (["NVIDIA GeForce RTX 4090"] * 5, "4x-rtx-4090"),
        (["NVIDIA H200"], "h200"),
        (["NVIDIA A100-SXM4-80GB"], "a100"),
        (["NVIDIA A100-SXM4-80GB"] * 8, "a100"),
    ],
)
def test_the_hardware_found_picks_its_profile(found, name):
    assert profiles.matching(found).name == profiles.load("auto", found).name == name


@pytest.mark.parametrize(
    "found",
    [
        ["NVIDIA H100 PCIe"],
        ["NVIDIA A100-SXM4-40GB"],
        ["NVIDIA GeForce RTX 4090 Laptop GPU"],
        ["NVIDIA GeForce RTX 4090 D"],
        ["NVIDIA GeForce RTX 4090", "NVIDIA T400"],
    ],
)
def test_a_gpu_without_a_profile(found):
    assert profiles.matching(found) is None
    with pytest.raises(SettingsError, match=f"no profile describes the GPU found: {found[0]}"):
        profiles.load("AUTO", found)


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 2), ("", 0), ("-1", 0), ("1", 1), ("0,1", 2), ("7", 0), ("GPU-3e1a", 1)],
)
def test_gpus_are_found_without_torch(tmp_path, monkeypatch, visible, count):
    for address in ("0000:01:00.0", "0000:41:00.0"):
        (tmp_path / address).mkdir()
        (tmp_path / address / "information").write_text("Model: \t NVIDIA L40S\nIRQ: 4\n")
    monkeypatch.setattr(gpus, "_DRIVER", tmp_path)
    assert gpus.gpu_names(visible) == ["NVIDIA L40S"] * count


def test_a_profile_has_the_values_of_its_file(written, tmp_path, monkeypatch):
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
    options = {f.name: f.default for group in GROUPS for f in fields(group)}
    del options["stop"], options["coupled"], options["approximate"]
    assert profiles.load(written(GOOD | {"options": options})).options == options


def test_profiles_are_frozen_and_validated_when_built_by_hand():
    profile = profiles.load("rtx-4090")
    with pytest.raises(FrozenInstanceError):
        profile.gpus = 3
    with pytest.raises(SettingsError, match=r"gpu\.memory_gib is -1"):
        replace(profile.gpu, memory_gib=-1)


def test_unreadable_files_are_refused(tmp_path):
    with pytest.raises(SettingsError, match=r"cannot read .*absent\.yaml: No such file"):
        profiles.load(tmp_path / "absent.yaml")
    with pytest.raises(SettingsError, match="cannot read"):
        profiles.load(f"{tmp_path}/")
    (tmp_path / "binary.yml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsError, match="not UTF-8"):
        profiles.load(tmp_path / "binary.yml")


def test_reading_profiles_imports_no_torch():
    code = (
        "import sys; from offload.hardware import profiles; profiles.load('4090'); profiles.matching([]);"
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
def test_what_is_not_a_number_of_tokens(text):
    with pytest.raises(SettingsError, match="is not a number of tokens"):
        parse_tokens(text)


def test_the_documented_example_is_a_profile(tmp_path):
    section = (ROOT / "docs" / "planning.md").read_text("utf-8").partition("## Your own profile")[2]
    (tmp_path / "mine.yaml").write_text(re.search(r"```yaml\n(.*?)```", section, re.DOTALL)[1], "utf-8")
    profile = profiles.load(tmp_path / "mine.yaml")
    assert (profile.name, profile.gpu) == ("mine", profiles.load("4090").gpu)
    assert profile.link.bandwidth_gb_s == 12.5
    assert profile.options["memory"] == 22 * 2**30
