"""The threads of host attention."""

import pytest
import torch

from offload.memory import host_attention
from offload.memory.host_attention import HostAttention, thread_count
from offload.memory.page import BlockPageFormat
from tests.support.fake_cuda import GPU
from tests.support.offloading import CPU
from tests.support.stores import tiny_shape


@pytest.mark.parametrize(
    ("threads", "cores", "expected"), [(8, 8, 7), (16, 8, 7), (4, 8, 4), (2, 2, 1), (1, 1, 1), (4, 1, 1)]
)
def test_a_gpu_leaves_a_core_to_the_launching_thread(set_threads, monkeypatch, threads, cores, expected):
    monkeypatch.setattr(host_attention, "usable_cores", lambda: cores)
    set_threads(threads)
    assert (thread_count(GPU), thread_count(CPU)) == (expected, threads)


def test_its_own_thread_takes_that_number(set_threads, monkeypatch):
    monkeypatch.setattr(host_attention, "usable_cores", lambda: 3)
    set_threads(3)
    for device, expected in ((GPU, 2), (CPU, 3)):
        attention = HostAttention(BlockPageFormat(tiny_shape(), 16), device)
        assert attention._pool.submit(torch.get_num_threads).result() == expected
    assert torch.get_num_threads() == 3
