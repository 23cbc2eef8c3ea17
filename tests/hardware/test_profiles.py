"""Hardware profiles: the shipped ones, how they are found, and what is said about a wrong one."""

import re
import subprocess
import sys
from collections import Counter
from dataclasses import FrozenInstanceError, asdict, fields, replace
from pathlib import Path

import pytest
import yaml

from offload.errors import SettingsError
from offload.hardware import driver as gpus
from offload.hardware import profiles
from offload.settings.config import GROUPS
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


@pytest.mark.parametrize("name", [name for name in profiles.available() if name != "cpu"])
def test_a_shipped_profile_is_plausible_and_every_name_of_its_gpu_leads_to_it(name):
    text = (ROOT / "profiles" / f"{name}.yaml").read_text("utf-8")
    assert text.startswith("# "), "no source"
    profile = profiles.load(name)
    gpu, link = profile.gpu, profile.link
    assert (profile.name, profile.device, profile.host) == (name, "cuda", profiles.Host())
    assert f"({gpu.memory_gib} GiB" in profile.description or gpu.memory_gib in (95, 140, 179)
    assert 60 < 1000 * gpu.bf16_tflops / gpu.bandwidth_gb_s < 440, "operations a byte"
    generation, lanes = re.fullmatch(r"PCIe ([345])\.0 x(8|16)", link.kind).groups()
    assert link.bandwidth_gb_s == {"3": 12.5, "4": 25, "5": 50}[generation] * int(lanes) / 16
    spelled = name.removeprefix("rtx-").replace("-", " ").upper()
    assert profiles.load(spelled).name == name
    found, named = profiles.matching([gpu.model] * profile.gpus), profiles.load(gpu.model)
    assert (found.gpu.model, found.gpus) == (gpu.model, profile.gpus)
    assert (named.gpu.model, named.gpus) == (gpu.model, 1)


def test_cards_of_one_name_differ_in_their_memory():
    sheets = [p for p in map(profiles.load, profiles.available()) if p.gpu]
    of_one_gpu = Counter(p.gpu.model for p in sheets if p.gpus == 1)
    several = {model for model, count in of_one_gpu.items() if count > 1}
    assert several == {f"NVIDIA GeForce RTX {card}" for card in ("3080", "4060 Ti", "5060 Ti")}
    assert len({(p.gpu.model, p.gpus, p.gpu.memory_gib) for p in sheets}) == len(sheets)


def test_gpus_without_bf16_run_in_float16():
    for name in ("t4", "rtx-2080-ti"):
        profile = profiles.load(name)
        assert profile.options["dtype"] == "float16"
        assert "float16" in profile.description


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
        ("3070", "rtx-3070"),
        ("4080 super", "rtx-4080-super"),
        ("4060", "rtx-4060"),
        ("4090 Laptop", "rtx-4090-laptop"),
        ("NVIDIA GeForce RTX 5070 Ti", "rtx-5070-ti"),
    ],
)
def test_names_are_forgiving(asked, name):
    assert profiles.load(asked).name == name


SUGGESTIONS = [
    ("409O", "did you mean rtx-4090, "),
    ("rtx409o", "did you mean rtx-4090, "),
    ("3o90", "did you mean rtx-3090, "),
    ("h10", "did you mean h100? "),
    ("l40", "did you mean l40s? "),
    ("atuo", "did you mean auto? "),
    ("voodoo", ""),
]


@pytest.mark.parametrize(("asked", "suggestion"), SUGGESTIONS)
def test_an_unknown_name_gets_the_closest_profiles(asked, suggestion):
    with pytest.raises(SettingsError, match=f"no profile '{asked}'") as caught:
        profiles.load(asked)
    hint = caught.value.hint
    assert hint.startswith(suggestion) and hint.count(", ") <= 2
    assert hint.endswith("`triforce profile` lists all; or give a path to a YAML file")


@pytest.mark.parametrize(
    ("asked", "meanings"),
    [
        ("6000", "a6000, rtx-6000-ada, rtx-pro-6000-blackwell"),
        ("rtx 50", "rtx-5060, rtx-5060-ti-16gb, rtx-5060-ti-8gb, rtx-5070, "),
        ("rtx", "rtx-2080-ti, rtx-3060, rtx-3060-ti"),
    ],
)
def test_an_ambiguous_name_lists_its_meanings(asked, meanings):
    with pytest.raises(SettingsError, match=f"no profile '{asked}'") as caught:
        profiles.load(asked)
    assert f"it may mean {'' if asked != 'rtx' else '2x-rtx-3090, 2x-rtx-4090, 4x-rtx-4090, '}{meanings}" in (
        caught.value.hint
    )
    assert "a100" not in caught.value.hint


@pytest.mark.parametrize(
    ("asked", "files"),
    [
        ("cpu", {"cpu.yaml"}),
        ("4090", {"rtx-4090.yaml"}),
        ("1x RTX 4090", {"rtx-4090.yaml"}),
        ("2x4090", {"2x-rtx-4090.yaml", "rtx-4090.yaml"}),  # the one extends the other
        ("NVIDIA A100-SXM4-80GB", {"a100.yaml"}),
        (["NVIDIA GeForce RTX 4070 Ti SUPER"], {"rtx-4070-ti-super.yaml"}),
        ([], {"cpu.yaml"}),
        (["NVIDIA T400"], set()),
    ],
)
def test_a_name_opens_no_other_profile(monkeypatch, asked, files):
    """Reading all of them costs a tenth of a second at every start."""
    profiles._shipped.cache_clear()
    opened, really_open = [], Path.open
    monkeypatch.setattr(Path, "open", lambda path, *args, **more: opened.append(path.name) or really_open(path, *args))
    profiles.load(asked) if isinstance(asked, str) else profiles.matching(asked)
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
        (["NVIDIA GeForce RTX 4070 Ti SUPER"], "rtx-4070-ti-super"),
        (["NVIDIA GeForce RTX 4070 Ti"], "rtx-4070-ti"),
        (["NVIDIA GeForce RTX 4070 Laptop GPU"], "rtx-4070-laptop"),
        (["NVIDIA GeForce RTX 5090 Laptop GPU"], "rtx-5090-laptop"),
        (["NVIDIA GeForce RTX 4060 Ti"], "rtx-4060-ti-16gb"),
    ],
)
def test_the_hardware_found_picks_its_profile(found, name):
    assert profiles.matching(found).name == profiles.load("auto", found).name == name


@pytest.mark.parametrize(
    "found",
    [
        ["NVIDIA H100 PCIe"],
        ["NVIDIA A100-SXM4-40GB"],
        ["NVIDIA GeForce RTX 4050 Laptop GPU"],
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
    del options["stop"], options["coupled"], options["approximate"], options["kv"], options["constraint"]
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


@pytest.mark.parametrize("text", ["", "K", "0", "-1", "1e9", "1G", "12 8K"])
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
