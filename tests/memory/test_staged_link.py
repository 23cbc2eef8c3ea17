"""The link of a device beside a disk: pieces of a file on their way through host memory, and stores over it."""

import tempfile
from pathlib import Path

import pytest
import torch

from offload.architecture.pages import DISK_READ_BYTES
from offload.memory.disk_link import DiskFailed, FileRange
from offload.memory.link import TransferFailed
from offload.memory.pages import Pages
from offload.system.scratch_file import ScratchFile
from tests.support.offloading import CPU, staged_link

FOLDER = Path(tempfile.gettempdir())
SIZE = 2 * DISK_READ_BYTES + 4096  # more than two pieces


def numbers(seed, size=SIZE):
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_pieces_of_a_file_go_to_the_device_and_back_in_order():
    link, file = staged_link(), ScratchFile(FOLDER, 2 * SIZE)
    first, second = FileRange(file, 0, SIZE), FileRange(file, SIZE, SIZE)
    there, found = [numbers(seed) for seed in (1, 2)], [torch.zeros(SIZE, dtype=torch.uint8) for _ in range(2)]
    link.copy([(first, there[0]), (second, there[1])], link.mark())
    ticket = link.copy([(found[0], second), (found[1], first)])
    link.wait(ticket)
    assert torch.equal(found[0], there[1]) and torch.equal(found[1], there[0])
    link.finish(ticket)
    assert link.seconds(ticket) > 0 and link.statistics.bytes == 4 * SIZE


class BrokenFile(ScratchFile):
    broken = False

    def read_some(self, views, offset):
        if self.broken:
            raise OSError(5, "the disk is gone")
        return super().read_some(views, offset)


def test_a_failure_of_either_end_is_raised_and_the_next_copy_arrives():
    loose = []
    link, file = staged_link(before=lambda pairs: loose and loose.pop()()), BrokenFile(FOLDER, SIZE)
    there, found = numbers(1), torch.zeros(SIZE, dtype=torch.uint8)
    link.finish(link.copy([(FileRange(file, 0, SIZE), there)]))
    file.broken = True
    with pytest.raises(DiskFailed, match="the disk is gone"):
        link.wait(link.copy([(found, FileRange(file, 0, SIZE))]))
    file.broken = False

    def fail():
        raise OSError("the cable is loose")

    for pair in ((found, FileRange(file, 0, SIZE)), (FileRange(file, 0, SIZE), there)):
        loose.append(fail)
        ticket = link.copy([pair])
        link.finish(ticket)
        with pytest.raises(TransferFailed, match="the cable is loose"):
            link.wait(ticket)
    link.finish(link.copy([(FileRange(file, 0, SIZE), there)]))
    link.wait(link.copy([(found, FileRange(file, 0, SIZE))]))
    assert torch.equal(found, there)


def test_pages_of_the_first_layers_are_in_memory():
    memory = torch.arange(2 * 3 * 8, dtype=torch.uint8).view(2, 3, 8)
    file = ScratchFile(FOLDER, 1 * 3 * 8)
    pages = Pages(None, (3, 3, 8), CPU, memory, file)
    assert torch.equal(pages.stored(0, slice(1, 3)), memory[0, 1:3])
    assert pages.stored(2, slice(1, 3)) == FileRange(file, 8, 16) and pages.part(2, 1, 3, 4) == FileRange(file, 11, 4)
