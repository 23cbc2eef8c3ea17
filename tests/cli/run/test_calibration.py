"""`triforce profile --measure`, and how plans use the saved rates. GPUs are simulated by files of a driver."""

import io
import json
import os
import sys
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch

from offload.hardware import driver as gpus
from offload.hardware import microbenchmarks as measure
from offload.hardware.calibration import Measured, load, save
from offload.hardware.microbenchmarks import BenchmarkSizes
from offload.hardware.profiles import load as load_profile
from offload.hardware.schema import Gpu, Host, Link
from offload.metrics import Summary
from triforce_cli.app import run
from triforce_cli.options import settings
from triforce_cli.run import measured_rates as measuring
from triforce_cli.run import plan
from triforce_cli.run.finished_runs import FILE, record

SMALL = BenchmarkSizes(read=2**26, copy=2**22, host_rows=64, device_rows=256)
HOST = Measured("2026-01-31", "some CPU, 4 cores", "2.9.0", "cpu", host=Host(16, 23, 345, 4))
MACHINE = replace(
    HOST,
    machine="1x NVIDIA GeForce RTX 4090, some CPU, 4 cores",
    device="cuda",
    gpus=1,
    gpu=Gpu("NVIDIA GeForce RTX 4090", 23.5, 950, 158),
    link=Link("measured", 24.1),
)
STRANGE = replace(MACHINE, machine="1x NVIDIA Strange", gpu=replace(MACHINE.gpu, model="NVIDIA Strange"))
SMALL_MODEL = ("--model", "llama-3.1-8b", "--context", "8K")


@pytest.fixture
def config(tmp_path):
    return tmp_path / "config"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """`machine("NVIDIA H200")`: the driver and torch report these GPUs."""

    def have(*names):
        for number, name in enumerate(names):
            (tmp_path / "driver" / str(number)).mkdir(parents=True)
            (tmp_path / "driver" / str(number) / "information").write_text(f"Model: {name}\n")
        monkeypatch.setattr(gpus, "_DRIVER", tmp_path / "driver")
        monkeypatch.setattr(gpus, "_from_program", list)
        for module in (settings, measuring, plan):
            monkeypatch.setattr(module, "gpu_names", lambda: list(names))

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    have()
    return have


@pytest.fixture
def measures(monkeypatch):
    """Replace the measurement by fixed rates; return the devices that were asked for."""
    asked = []

    def find(found):
        monkeypatch.setattr(measure, "measure", lambda device, processor, sizes=None: asked.append(device) or found)
        return asked

    return find


@pytest.fixture
def triforce(tiny_model_dir, config, machine, monkeypatch, capsys):
    """`triforce("profile") -> (exit code, stdout, stderr)` in this process, measuring small sizes."""
    before = torch.get_num_threads()
    chosen = {"CONFIG": config, "MODEL": tiny_model_dir, "HOME": config.parent, "DEVICE": "cpu", "THREADS": 0}
    for name in ("PROFILE", "COLOR", "METHOD", "DEBUG"):
        monkeypatch.delenv(f"TRIFORCE_{name}", raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(f"TRIFORCE_{name}", str(value))
    monkeypatch.setattr(measure, "QUICK", SMALL)
    monkeypatch.setattr(measure, "measure", partial(measure.measure, sizes=SMALL))

    def call(*args):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
        code = run([str(arg) for arg in args])
        return code, *capsys.readouterr()

    yield call
    torch.set_num_threads(before)


def assert_error(result, code, *words):
    """One error and one hint, the plan left out."""
    assert result[0] == code, result
    lines = result[2].splitlines()
    assert len(lines) == 2 and lines[0].startswith("error: ") and lines[1].startswith("hint: "), lines
    assert "triforce generate" not in result[1]
    for word in words:
        assert word in result[2]


def test_this_machine_is_measured_shown_saved_and_used(triforce, config):
    code, out, err = triforce("profile", "--measure")
    assert (code, err, load(config)) == (0, "", None)
    assert "GFLOP/s bf16" in out and " assumed" in out
    code, out, err = triforce("profile", "--measure", "--save")
    assert (code, err) == (0, f"saved to {config / 'measured.yaml'}\n")
    found = load(config)
    assert f"measured on {found.date}" in out
    code, out, err = triforce("profile", "-v")
    assert (code, err) == (0, "")
    assert f"measured   on {found.date}: the rates above" in out
    assert f"{load(config).host.bf16_gflops:,.0f} GFLOP/s\n" in out


@pytest.mark.parametrize("args", [("profile", "-v"), ("generate", "Once", "--dry-run", "-v")])
def test_plans_for_this_machine_take_the_highest_rates_that_it_has_shown(triforce, config, args):
    """Measured again beside a busy process, it does not get slower."""
    code, out, _ = triforce(*args)
    found = load(config)
    assert code == 0 and found.host.bandwidth_gb_s > 0
    assert f"measured   on {found.date}: the rates above, of {found.machine}" in out and "assumed" not in out
    save(replace(found, host=replace(found.host, bandwidth_gb_s=9999.0, bf16_gflops=0.5)), config)
    triforce(*args)
    host = load(config).host
    assert host.bandwidth_gb_s == 9999 and host.bf16_gflops > 0.5


def test_a_finished_run_corrects_the_plans_of_its_model(triforce, config, measures):
    """By the fastest of them: a busy hour does not count, and nor does a short prompt or a damaged file."""
    measures(HOST)

    def planned(command="generate"):
        more = ("Once", "--dry-run") if command == "generate" else ()
        plan = json.loads(triforce(command, *more, "--json")[1])["plan"]
        return plan["ttft"]["seconds"], plan["chosen"]["tbt"]["seconds"]

    by_rates = planned()
    summary = Summary("length", 600, 600, 8, 2.0, 300.0, 2.0, 0.1, 0.1, 10.0, 3.0, computed_tokens=600)
    summary = replace(summary, model=os.environ["TRIFORCE_MODEL"], settings={"device": "cpu"})
    record(replace(summary, computed_tokens=100))
    assert planned() == by_rates
    record(summary)
    by_run = planned()
    assert by_run[0] > 10 * by_rates[0] and by_run[1] == pytest.approx(0.1, rel=0.2)
    record(replace(summary, prefill_s=20.0, tokens_per_s=1.0))
    assert planned() == by_run and planned("profile")[1] == pytest.approx(0.1, rel=0.2)
    record(replace(summary, prefill_s=1.0))
    assert planned()[0] == pytest.approx(by_run[0] / 2)
    (config / FILE).write_text('{"x": 1}')
    assert planned() == by_rates


def test_json_carries_what_was_measured(triforce, config, measures):
    assert json.loads(triforce("profile", "--gpu", "cpu", "--json")[1])["measured"] is None
    now = json.loads(triforce("profile", "--measure", "--json")[1])
    assert now["profile"] == asdict(load_profile("cpu"))  # the data sheet
    assert now["plan"]["hardware"]["host_flops"] == now["measured"]["host"]["bf16_gflops"] * 1e9
    save(HOST, config)
    measures(HOST)
    shown = json.loads(triforce("profile", "--json")[1])
    assert shown["measured"] == asdict(HOST)
    assert shown["plan"]["hardware"]["host_bandwidth"] == 23e9
    assert shown["plan"]["hardware"]["assumed"] == []
    assert json.loads(triforce("profile", "--gpu", "4090", "--json")[1])["measured"] is None
    assert json.loads(triforce("profile", "--compare", "--json")[1])["measured"] == asdict(HOST)


def test_wrong_use_of_measuring(triforce, machine, config):
    assert_error(triforce("profile", "--save"), 2, "--save", "--measure --save")
    assert_error(
        triforce("profile", "--measure", "--gpu", "4090"), 2, "which has no GPU", "1 x NVIDIA GeForce RTX 4090"
    )
    assert_error(triforce("profile", "--measure", "--gpu", "409O"), 2, "did you mean rtx-4090")
    assert_error(triforce("profile", "--measure", "--model", "qwen3-9b"), 2, "did you mean Qwen3-8B")
    assert_error(triforce("profile", "--gpu", "atuo"), 2, "did you mean auto?")
    machine("NVIDIA GeForce RTX 4090")
    assert_error(triforce("profile", "--measure", "--gpu", "2x4090"), 2, "not 2 x NVIDIA GeForce RTX 4090")
    assert_error(triforce("profile", "--measure", "--gpu", "a100"), 2, "has NVIDIA GeForce RTX 4090, not 1 x")
    assert not config.exists()


def test_a_folder_that_cannot_be_written(triforce, config):
    config.write_text("a file")
    code, _, err = triforce("profile", "--measure", "--save")
    assert code == 1 and "error: cannot write" in err and "TRIFORCE_CONFIG" in err


def test_an_unusable_file_is_a_warning(triforce, config):
    save(HOST, config).write_text("cores: many")
    for args in (["profile"], ["profile", "--gpu", "cpu", "--json"], ["generate", "hi", "--dry-run"]):
        code, out, err = triforce(*args)
        assert code == 0 and out
        assert err.startswith("warning: ") and "data sheets are used instead" in err and err.count("\n") == 1
    code, _, err = triforce("generate", "hi", "-n", "1", "--quiet")  # asks for no rates
    assert (code, err) == (0, "")


@pytest.mark.long
def test_a_known_gpu_takes_its_measured_rates(triforce, machine, config, measures):
    machine("NVIDIA GeForce RTX 4090")
    asked = measures(MACHINE)
    code, out, err = triforce("profile", "--measure", "--save", *SMALL_MODEL)
    assert (code, asked) == (0, ["cuda:0"])
    rows = [line.split() for line in out.splitlines()]
    assert ["GPU", "memory", "950", "1,008", "GB/s"] in rows
    code, out, err = triforce("profile", "--gpu", "auto", "-v", *SMALL_MODEL)
    assert (code, err) == (0, "")
    assert "24.00 GiB, 950 GB/s, 158 TFLOP/s bf16, link 24.1 GB/s" in out
    assert "--gpu rtx-4090" in out
    assert "rates of 2x-rtx-4090, rtx-4090, of" in triforce("profile", "--compare", *SMALL_MODEL)[1]


@pytest.mark.long
def test_a_gpu_without_a_profile_is_planned_once_measured(triforce, machine, measures):
    machine("NVIDIA Strange")
    assert_error(triforce("profile"), 2, "no profile describes the GPU found: NVIDIA Strange", "--measure")
    measures(STRANGE)
    code, out, err = triforce("profile", "--measure", "--save", *SMALL_MODEL)
    assert code == 0 and err.startswith("saved to ")
    code, out, err = triforce("profile", "--gpu", "auto", "-v", *SMALL_MODEL)
    assert (code, err) == (0, "")
    assert "23.50 GiB, 950 GB/s" in out and "--gpu auto" in out
