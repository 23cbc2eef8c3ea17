"""Memory nodes: which ones a process may use, and which system calls interleave memory over them."""

import ctypes
import errno
import mmap
import sys
import weakref

import pytest
import torch

from offload.kernels.native import find_kernel, layout
from offload.kernels.native.layout import pack_weight, panel_memory, unpack_weight
from offload.memory.host_memory import host_memory
from offload.system import numa
from offload.system.numa import Nodes, new_memory, usable_nodes
from tests.support.native_kernel import draw

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="memory policies of Linux")
POLICY, BIND = 1, 0


@pytest.fixture
def calls(monkeypatch):
    """Two nodes whose system calls are recorded; `calls.policy` is what the process has, `calls.refused` an error."""

    class Calls(list):
        policy, refused = 0, None

        def __call__(self, which, *arguments):
            if self.refused:
                raise OSError(self.refused, "Operation not permitted")
            if which == POLICY:
                arguments[0]._obj.value = self.policy
            else:
                _, size, mode, mask, _, flags = arguments
                self.append((size.value, mode, int.from_bytes(mask, sys.byteorder), flags.value))

    found = Calls()
    monkeypatch.setattr(numa, "_call", found)
    monkeypatch.setattr(numa, "usable_nodes", lambda processors: (0, 2))
    numa.nodes.cache_clear()
    yield found
    numa.nodes.cache_clear()


def write_nodes(root, allowed="0-3"):
    """Four nodes: two with processors, one with memory alone, and one whose processors are not ours."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/status").write_text(f"Name:\tx\nMems_allowed:\tff\nMems_allowed_list:\t{allowed}\nnext:\t1\n")
    for number, processors in enumerate(("0-3", "4-7", "", "8-11")):
        (root / f"sys/devices/system/node/node{number}").mkdir(parents=True)
        (root / f"sys/devices/system/node/node{number}/cpulist").write_text(f"{processors}\n")


@pytest.mark.parametrize(
    ("allowed", "processors", "expected"),
    [
        ("0-3", range(8), (0, 1)),
        ("0-3", range(12), (0, 1, 3)),
        ("0-3", range(4), (0,)),
        ("1-3", range(8), (1,)),
        ("", range(8), ()),
    ],
)
def test_nodes_with_processors_and_memory_of_this_process(tmp_path, allowed, processors, expected):
    write_nodes(tmp_path, allowed)
    assert usable_nodes(set(processors), tmp_path) == expected


def test_a_system_without_nodes_has_none(tmp_path):
    assert usable_nodes({0, 1}, tmp_path) == ()


def test_keys_values_and_large_weights_are_interleaved(calls, monkeypatch):
    monkeypatch.setattr(layout, "_MAPPING", 0)  # no weight shares one
    assert numa.nodes() == Nodes((0, 2), is_interleaved=True)
    calls.clear()  # the attempt
    host_memory((3, mmap.PAGESIZE), torch.bfloat16)
    weight = draw(1000, 512, dtype=torch.float32)
    packed = pack_weight(weight)
    assert torch.equal(unpack_weight(packed, 1000), weight)
    interleave, both, no_flags = 3, 0b101, 0
    sizes = [3 * mmap.PAGESIZE * 2, packed.nbytes]
    assert calls == [(size, interleave, both, no_flags) for size in sizes]
    panel_memory((10, 10), torch.float32)
    assert len(calls) == 2, "a small weight is left where it is"


def test_a_policy_of_the_process_is_respected(calls):
    calls.policy = 3  # numactl --interleave
    assert not numa.nodes().is_interleaved and "policy of its own" in numa.nodes().reason
    new_memory(mmap.PAGESIZE)
    assert not calls


def test_a_system_that_refuses_changes_nothing(calls):
    calls.refused = errno.EPERM
    assert numa.nodes().reason == "the system refuses it: Operation not permitted"
    assert bytes(new_memory(mmap.PAGESIZE)) == bytes(mmap.PAGESIZE)
    assert panel_memory((1024, 1024), torch.float32).shape == (1024, 1024)


def test_memory_that_is_refused_later_lies_where_it_is_written(calls):
    assert numa.nodes().is_interleaved
    calls.refused = errno.EINVAL  # a node was taken away from the process
    assert bytes(new_memory(mmap.PAGESIZE)) == bytes(mmap.PAGESIZE)


@LINUX
def test_the_system_takes_the_calls(monkeypatch):
    """On this machine's own nodes, of which one is enough; the policy of the process stays what it was."""
    try:
        before = numa._policy()
    except OSError as error:
        pytest.skip(f"not here: {error}")
    own = usable_nodes(numa.allowed_processors())
    monkeypatch.setattr(numa, "nodes", lambda: Nodes(own, is_interleaved=True))
    memory = new_memory(4 * mmap.PAGESIZE)
    memory[:] = b"x" * len(memory)
    address, mode = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory))), ctypes.c_int()
    of_address = ctypes.c_ulong(2)
    numa._call(POLICY, ctypes.byref(mode), None, ctypes.c_ulong(0), address, of_address)
    assert mode.value == 3 and numa._policy() == before
    with pytest.raises(OSError, match="Invalid argument"):
        numa._bind(memory, (numa._MOST_NODES - 1,))


@LINUX
def test_weights_share_a_mapping_that_is_freed_with_the_last_of_them():
    shared = layout._SharedMapping()
    memory, first = shared.place(layout._SMALL + 1)
    other, second = shared.place(layout._SMALL)
    assert other is memory and (first, second) == (0, layout._SMALL + layout._LINE)
    full, start = shared.place(layout._MAPPING // 8)
    while full is memory:
        full, start = shared.place(layout._MAPPING // 8)
    assert start == 0, "what does not fit begins a mapping"
    own, start = shared.place(layout._MAPPING // 8 + 1)
    assert len(own) == layout._MAPPING // 8 + 1 and start == 0
    kept = [weakref.ref(each) for each in (memory, full)]
    del memory, other, full
    assert [each() for each in kept] == [None, None]


def test_products_of_panels_in_a_mapping_have_the_same_bits(monkeypatch):
    kernel = find_kernel()
    weight, x = draw(100, 64, seed=1), draw(3, 64, seed=2)
    found = []
    for small in (2**30, 0, 0):
        monkeypatch.setattr(layout, "_SMALL", small)
        found.append(kernel.linear(x, pack_weight(weight), None, None, torch.empty(3, 100, dtype=weight.dtype)))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
