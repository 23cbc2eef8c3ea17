"""Hardware profiles: the shipped ones, how they are found, and what is said about a wrong one."""

import re
from dataclasses import asdict, fields

import pytest
import yaml

from offload.errors import SettingsError
from offload.hardware import driver as gpus
from offload.hardware import profiles
from offload.settings.config import GROUPS
from tests.support.paths import ROOT

GOOD = {
    "name": "mine",
    "description": "a test",
    "device": "cuda",
    "gpus": 1,
    "gpu": {"model": "NVIDIA Thing", "memory_gib": 12, "bandwidth_gb_s": 500.5, "bf16_tflops": 80},
    "link": {"kind": "PCIe 3.0 x16", "bandwidth_gb_s": 12},
    "host": {"memory_gib": None, "bandwidth_gb_s": 40, "bf16_gflops": None, "cores": 8, "disk_gb_s": None},
    "options": {"temperature": 0, "prefill_chunk": 1024, "dtype": "float16", "seed": 7},
}


def changed(**changes):
    return yaml.safe_dump(GOOD | changes)


@pytest.mark.parametrize("name", [name for name in profiles.available() if name != "cpu"])
def test_a_shipped_profile_is_plausible_and_every_name_of_its_gpu_leads_to_it(name):
    assert (ROOT / "profiles" / f"{name}.yaml").read_text("utf-8").startswith("# "), "no source"
    profile = profiles.load(name)
    gpu, link = profile.gpu, profile.link
    assert (profile.name, profile.device, profile.host) == (name, "cuda", profiles.Host())
    assert f"{gpu.memory_gib} GiB" in profile.description
    assert 40 < 1000 * gpu.bf16_tflops / gpu.bandwidth_gb_s < 440, "operations a byte"
    generation, lanes = re.fullmatch(r"PCIe ([345])\.0 x(8|16)", link.kind).groups()
    assert link.bandwidth_gb_s == {"3": 12.5, "4": 25, "5": 50}[generation] * int(lanes) / 16
    assert profiles.load(name.removeprefix("rtx-").removeprefix("gtx-").replace("-", " ").upper()).name == name
    found, named = profiles.matching([gpu.model] * profile.gpus), profiles.load(gpu.model)
    assert (found.gpu.model, found.gpus) == (gpu.model, profile.gpus)
    assert (named.gpu.model, named.gpus) == (gpu.model, 1)


def test_gpus_without_bf16_run_in_float16():
    halves = [name for name in profiles.available() if profiles.load(name).options.get("dtype") == "float16"]
    assert halves == ["gtx-1650", "gtx-1660", "t4"]


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("4090", "rtx-4090"),
        ("1x4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("2 x RTX_4090", "2x-rtx-4090"),
        ("A100-SXM4-80GB", "a100"),
        ("CPU", "cpu"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 5070 Ti", "rtx-5070-ti"),
        ("RTX 3070 Laptop", "rtx-3070-laptop"),
        ("laptop 3060", "rtx-3060-laptop"),
        ("3080 mobile", "rtx-3080-laptop"),
        ("GTX 1650", "gtx-1650"),
    ],
)
def test_names_are_forgiving(asked, name):
    assert profiles.load(asked).name == name


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ("409O", "did you mean rtx-4090, "),
        ("h10", "did you mean h100? "),
        ("rtx 50", "did you mean rtx-5060-ti-16gb, rtx-5070-ti, rtx-5080, rtx-5090? "),
        (
            "voodoo",
            "`triforce profile --compare` lists all; another GPU is a YAML file with lines such as `extends: ",
        ),
        ("M3 Max", "only NVIDIA GPUs and CPUs"),
        ("Radeon RX 7900 XT", "only NVIDIA GPUs and CPUs"),
        ("rx 7900", "only NVIDIA GPUs and CPUs"),
        ("../profiles", "check its path"),
    ],
)
def test_an_unknown_name_gets_the_closest_profiles(asked, hint):
    with pytest.raises(SettingsError) as caught:
        profiles.load(asked)
    assert caught.value.hint.startswith(hint)


@pytest.mark.parametrize(
    ("found", "name"),
    [
        ([], "cpu"),
        (["NVIDIA GeForce RTX 4090"], "rtx-4090"),
        (["NVIDIA GeForce RTX 4090"] * 3, "2x-rtx-4090"),
        (["NVIDIA A100-SXM4-80GB"] * 8, "a100"),
        (["NVIDIA GeForce RTX 4060 Ti"], "rtx-4060-ti-16gb"),
        (["NVIDIA A100-SXM4-40GB"], None),
        (["NVIDIA GeForce RTX 4090 Laptop GPU"], None),
        (["NVIDIA GeForce RTX 4090", "NVIDIA T400"], None),
    ],
)
def test_the_hardware_found_picks_its_profile(found, name):
    if name is None:
        assert profiles.matching(found) is None
        with pytest.raises(SettingsError, match=f"no profile describes the GPU found: {found[0]}"):
            profiles.load("AUTO", found)
    else:
        assert profiles.matching(found).name == profiles.load("auto", found).name == name


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 2), ("", 0), ("-1", 0), ("1", 1), ("0,1", 2), ("7", 0), ("GPU-3e1a", 1)]
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
    monkeypatch.chdir(tmp_path)
    assert profiles.load("mine.yaml") == profiles.load(tmp_path / "mine.yaml") == profile
    bare = {"name": "mine", "description": "", "device": "cuda", "gpus": 1}
    assert profiles.load(written(bare)) == profiles.load(written(bare | {"gpu": None, "link": None, "host": None}))
    sized = profiles.load(written(GOOD | {"options": {"memory": "22GiB", "tree": 8}}))
    assert sized.options == {"memory": 22 * 2**30, "tree": "8"}


def test_every_option_can_be_given_a_default(written):
    options = {f.name: f.default for group in GROUPS for f in fields(group)}
    del options["stop"], options["coupled"], options["approximate"], options["kv"], options["constraint"]
    assert profiles.load(written(GOOD | {"options": options})).options == options


WRONG = [
    (changed(gpu=GOOD["gpu"] | {"memory_gib": -1}), "gpu.memory_gib is -1", "positive"),
    (changed(gpu=GOOD["gpu"] | {"memory_gib": "much"}), "gpu.memory_gib is 'much', not a number", "correct"),
    (changed(gpu=GOOD["gpu"] | {"memroy_gib": 1}), "unknown key gpu.memroy_gib", "did you mean memory_gib?"),
    (changed(gpus=0), "gpus is 0", "gpus: 1"),
    ("extend: rtx-3060", "unknown key extend", "did you mean extends?"),
    ("gpu: {memory_gib: 12}", "gpu.model, gpu.bandwidth_gb_s, gpu.bf16_tflops missing", "`extends: rtx-3060`"),
    (changed(device="tpu"), "device is 'tpu'", "cpu or cuda"),
    (changed(device="cpu"), "device is cpu, but GPUs are described", "remove"),
    (changed(link={"kind": "PCIe"}), "link.bandwidth_gb_s missing", "`extends: rtx-3060`"),
    (changed(options={"temperatur": 1}), "unknown key options.temperatur", "did you mean temperature?"),
    (changed(options={"temperature": "hot"}), "options.temperature: temperature is 'hot'", "number"),
    (changed(options={"temperature": -1}), "options.temperature: temperature is -1", ""),
    (changed(options={"memory": "much"}), "options.memory: ", ""),
    (changed(options={"kv": "q8"}), "unknown key options.kv", ""),
    ("[1, 2]", "the file is [1, 2], not keys and values", "`extends: rtx-3060`"),
    ("a: [1", "line 1: not valid YAML", "correct"),
    ("a: 2026-13-45", "not valid YAML", "correct"),
    ("[" * 5000, "not valid YAML", "correct"),
    ("a: " + "1" * 70000, "more than 65,536 bytes", "small"),
]


@pytest.mark.parametrize(("text", "message", "hint"), WRONG, ids=range(len(WRONG)))
def test_what_is_wrong_in_a_file_is_named_with_the_file_and_the_key(written, text, message, hint):
    path = written(text)
    with pytest.raises(SettingsError) as caught:
        profiles.load(path)
    assert caught.value.message.startswith((path, f"{path},")) and message in caught.value.message
    assert hint in caught.value.hint


def test_a_file_extends_a_profile_or_another_file(tmp_path):
    (tmp_path / "base.yaml").write_text("extends: 4090\ngpu: {memory_gib: 22}\n")
    (tmp_path / "mine.yaml").write_text("extends: base.yaml\ndescription: My machine\n")
    mine, sheet = profiles.load(tmp_path / "mine.yaml"), profiles.load("4090")
    assert (mine.name, mine.description, mine.gpu.memory_gib) == ("mine", "My machine", 22)
    assert (mine.gpu.bandwidth_gb_s, mine.link) == (sheet.gpu.bandwidth_gb_s, sheet.link)
    for text, message in (
        ("extends: 409O", "extends 409O"),
        ("extends: none.yaml", "No such"),
        ("extends: a.yaml", "cycle"),
    ):
        (tmp_path / "a.yaml").write_text(text)
        with pytest.raises(SettingsError, match=message):
            profiles.load(tmp_path / "a.yaml")


def test_unreadable_files_are_refused(tmp_path):
    with pytest.raises(SettingsError, match=r"cannot read .*absent\.yaml: No such file"):
        profiles.load(tmp_path / "absent.yaml")
    (tmp_path / "binary.yml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsError, match="not UTF-8"):
        profiles.load(tmp_path / "binary.yml")


def test_the_documented_example_is_a_profile(tmp_path):
    section = (ROOT / "docs" / "planning.md").read_text("utf-8").partition("## Your own profile")[2]
    (tmp_path / "mine.yaml").write_text(re.search(r"```yaml\n(.*?)```", section, re.DOTALL)[1], "utf-8")
    profile = profiles.load(tmp_path / "mine.yaml")
    assert (profile.name, profile.gpu) == ("mine", profiles.load("4090").gpu)
    assert profile.link.bandwidth_gb_s == 12.5
    assert profile.options["memory"] == 22 * 2**30
