"""KV on disk on the command line: the same text, a plan that says where what lies, and refusals with a hint."""

import json

import pytest

from offload.hardware.calibration import Measured, load, save
from offload.hardware.microbenchmarks import BenchmarkSizes
from offload.hardware.schema import Host
from tests.support.models import make_hf_model, make_tokenizer
from triforce_cli.options.checks import free_on_disk

PROMPT = "the cat and the dog and the cat and the dog and " * 50  # more tokens than a page has
GREEDY = ("--raw", "-n", "16", "--temperature", "0", "--no-cache")


def set_page(monkeypatch, tokens):
    """Make pages of so many tokens, whatever a model's keys and values take."""
    for name in ("architecture.pages.LEAST_PAGE", "architecture.pages.LARGEST_PAGE"):
        monkeypatch.setattr(f"offload.{name}", tokens)
    monkeypatch.setattr("offload.memory.tier_settings.TierSettings.page_unit", tokens)


@pytest.fixture
def args(tmp_path, monkeypatch):
    """Arguments for a model whose KV is many small pages."""
    set_page(monkeypatch, 64)
    make_hf_model("llama", num_hidden_layers=6).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "disk").mkdir()
    return ("generate", PROMPT, *GREEDY, "--model", tmp_path / "model")


@pytest.fixture
def on_disk(args, triforce_here, tmp_path):
    """Arguments with which a part of the KV does not fit into memory."""
    roomy = json.loads(triforce_here(*args, "--disk", tmp_path / "disk", "--dry-run", "--json")[1])["plan"]
    assert roomy["resident_layers"] == roomy["layers"] and not roomy["memory"]["disk"]["parts"]
    return (*args, "--disk", tmp_path / "disk", "--host-memory", int(0.7 * roomy["memory"]["host"]["total"]))


def test_the_text_is_that_of_memory_and_nothing_is_left(triforce_here, args, on_disk, tmp_path):
    _, plain, _ = triforce_here(*args)
    code, out, err = triforce_here(*on_disk, "--method", "retrieval", "--budget", "64", "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0, err
    assert "".join(line["text"] for line in lines if line["type"] == "text") == plain.removesuffix("\n")
    assert lines[-1]["link_bytes"] > 0
    assert not list((tmp_path / "disk").iterdir())


def test_the_plan_says_what_lies_on_disk(triforce_here, on_disk, tmp_path):
    free = free_on_disk(tmp_path)  # others may write meanwhile
    plan = json.loads(triforce_here(*on_disk, "--dry-run", "--json")[1])["plan"]
    disk, host = plan["memory"]["disk"], plan["memory"]["host"]
    assert plan["fits"] and plan["resident_layers"] < plan["layers"]
    assert 0 < disk["total"] <= disk["limit"] <= max(free, free_on_disk(tmp_path)) * 1.01
    assert host["total"] <= host["limit"] == on_disk[-1]
    assert plan["plain"]["tbt"]["resources"]["disk"] > 0
    _, text, _ = triforce_here(*on_disk, "--dry-run")
    assert f"of the others in {tmp_path / 'disk'}\n" in text and f"--disk {tmp_path / 'disk'}" in text


def test_a_disk_limit_that_is_too_small_is_told_before_the_run(triforce_here, on_disk):
    for more in ((), ("--dry-run",)):
        code, _, err = triforce_here(*on_disk, "--set", "disk_limit=10KB", *more)
        assert code == 1
        assert "of disk (KV cache" in err and "where 9.8 KiB may be used" in err and "hint: " in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--disk", "absent"), "absent"),
        (("--disk", ""), "empty"),
    ],
)
def test_what_cannot_be_is_refused_with_a_hint(triforce_here, tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    for more in ((), ("--dry-run",)):
        code, _, err = triforce_here("generate", PROMPT, *GREEDY, *args, *more)
        assert code in (1, 2)
        assert message in err and "hint: " in err


@pytest.mark.parametrize("kv", ["bf16", "q8"])
def test_beside_a_device_the_disk_takes_what_host_memory_has_no_room_for(
    triforce_here, args, tmp_path, monkeypatch, kv
):
    """Over a simulated link: the text is that of memory. What passes through host memory does so in small pieces."""
    for module in ("planning.memory", "memory.disk_link"):
        monkeypatch.setattr(f"offload.{module}.DISK_READ_BYTES", 4096)
    set_page(monkeypatch, 128)  # pages of quantised ones are whole windows
    _, plain, _ = triforce_here(*args, "--kv", kv)
    more = ("--kv", kv, "--link", "5", "--resident-layers", "1")
    roomy = json.loads(triforce_here(*args, *more, "--dry-run", "--json")[1])["plan"]["memory"]["host"]["total"]
    disk = (*more, "--disk", tmp_path / "disk", "--host-memory", int(0.6 * roomy) + 3 * 4096)
    plan = json.loads(triforce_here(*args, *disk, "--dry-run", "--json")[1])["plan"]
    assert plan["fits"] and plan["memory"]["host"]["parts"]["KV cache"] > 0 < plan["memory"]["disk"]["total"]
    code, out, err = triforce_here(*args, *disk, "--method", "retrieval", "--budget", "64")
    assert (code, out) == (0, plain), err
    assert not list((tmp_path / "disk").iterdir())


def test_a_gpu_is_planned_with_a_disk(triforce_here, tmp_path):
    asked = ("profile", "--gpu", "4090", "--model", "Llama-2-7B-128K", "--host-memory", "32GiB", "--json")
    plan = json.loads(triforce_here(*asked, "--disk", tmp_path, "--set", "disk_limit=1000GiB")[1])["plan"]
    assert plan["memory"]["disk"]["total"] > 0 and plan["memory"]["host"]["total"] <= 32 * 2**30


def test_a_disk_is_measured_once_and_its_rate_is_kept(triforce_here, tmp_path, monkeypatch):
    saved = Measured("2026-01-31", "some CPU, 4 cores", "2.9.0", "cpu", host=Host(16, 23, 345, 4))
    monkeypatch.setattr("offload.hardware.microbenchmarks.QUICK", BenchmarkSizes(disk=2**23, seconds=0))
    monkeypatch.setenv("TRIFORCE_CONFIG", str(tmp_path))
    save(saved, tmp_path)
    args = ("generate", PROMPT, *GREEDY, "--disk", tmp_path, "--dry-run", "--json")
    found = [json.loads(triforce_here(*args)[1])["plan"]["hardware"]["disk"] for _ in range(2)]
    assert found[0] == found[1] == pytest.approx(load(tmp_path).host.disk_gb_s * 1e9)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["measured.yaml"]
