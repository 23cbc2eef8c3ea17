"""Which formats of keys and values a GPU's processors cannot read as fast as its memory."""

from dataclasses import replace

import pytest

from offload.hardware import profiles
from offload.hardware.rates import BYTES_A_CYCLE, PROCESSORS, describe, read_share
from offload.settings.kv_formats import KV_FORMATS


@pytest.mark.parametrize(
    ("gpu", "kv", "share"),
    [
        ("h100", "exact", 1.0),
        ("h100", "packed", 1.0),
        ("h200", "packed", 0.89),
        ("h100", "q8", 0.68),
        ("a100", "q4", 0.35),
        ("rtx-4090", "q4", 1.0),
    ],
)
def test_instructions_bind_where_memory_gives_more_than_they_read(gpu, kv, share):
    assert read_share(describe(profiles.load(gpu)), kv) == pytest.approx(share, abs=0.01)


def test_other_gpus_have_memories_that_no_kernel_is_too_slow_for():
    """Of the profiles; with 20 processors less than the smallest of its bandwidth has, and 2 GHz."""
    assert set(BYTES_A_CYCLE) < set(KV_FORMATS) and set(PROCESSORS) < set(profiles.available())
    hardware = describe(profiles.load("rtx-5090"))  # 170 processors, 1,792 GB/s: the most of a card with GDDR
    assert hardware.bandwidth * 0.85 / (170 * 2.41e9) < min(BYTES_A_CYCLE.values())
    assert read_share(replace(hardware, name="h100"), "q4") < 1.0
