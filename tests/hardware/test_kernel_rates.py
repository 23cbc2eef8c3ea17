"""Rates that depend on processors: formats that a GPU reads slower than its memory gives, and a CPU's cores."""

from dataclasses import replace

import pytest

from offload.hardware import profiles
from offload.hardware.rates import BYTES_A_CYCLE, PROCESSORS, describe, on_threads, read_share
from offload.settings.kv_formats import KV_FORMATS


@pytest.mark.parametrize(
    ("gpu", "kv", "share"),
    [
        ("h100", "bf16", 1.0),
        ("h100", "packed", 1.0),
        ("h200", "packed", 0.89),
        ("h100", "q8", 0.68),
    ],
)
def test_instructions_bind_where_memory_gives_more_than_they_read(gpu, kv, share):
    assert read_share(describe(profiles.load(gpu)), kv) == pytest.approx(share, abs=0.01)


def test_other_gpus_have_memories_that_no_kernel_is_too_slow_for():
    """Of the profiles; with 20 processors less than the smallest of its bandwidth has, and 2 GHz."""
    assert set(BYTES_A_CYCLE) < set(KV_FORMATS) and set(PROCESSORS) < set(profiles.available())
    hardware = describe(profiles.load("rtx-5090"))  # 170 processors, 1,792 GB/s: the most of a card with GDDR
    assert hardware.bandwidth * 0.85 / (170 * 2.41e9) < min(BYTES_A_CYCLE.values())


@pytest.mark.parametrize(
    ("cores", "gb_s", "threads", "expected"),
    [
        (64, 900, 0, (900, 6400)),
        (64, 900, 8, (168, 800)),  # cores bind
        (64, 900, 48, (900, 4800)),  # memory binds
        (64, 900, 128, (900, 6400)),  # more than cores give no more
        (2, 50, 1, (25, 3200)),  # a core that was measured to read more than most
    ],
)
def test_a_cpu_reads_by_its_threads_until_memory_binds(cores, gb_s, threads, expected):
    host = profiles.Host(bandwidth_gb_s=gb_s, bf16_gflops=6400, cores=cores)
    found = on_threads(describe(replace(profiles.load("cpu"), host=host)), threads)
    assert (found.bandwidth / 1e9, found.flops / 1e9) == pytest.approx(expected)
    assert (found.bandwidth, found.flops) == (found.host_bandwidth, found.host_flops)
    assert found.link == found.bandwidth / 2


def test_threads_are_no_matter_of_a_gpu():
    hardware = describe(profiles.load("rtx-4090"))
    assert on_threads(hardware, 1) is hardware
