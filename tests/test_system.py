"""Free memory where a container limits it, read from a control group's files as the kernel writes them."""

import pytest

from offload.system.machine import free_in_groups

FILES = {
    2: ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    1: ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
}


def write_group(root, version, limit, used, droppable):
    *names, key = FILES[version]
    for name, text in zip(names, (limit, used, f"anon 5\n{key} {droppable}"), strict=True):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(f"{text}\n")


@pytest.mark.parametrize("version", [1, 2])
def test_droppable_file_pages_are_free(tmp_path, version):
    write_group(tmp_path, version, 1000, 900, 300)
    assert list(free_in_groups(tmp_path)) == [400]


def test_a_group_over_its_limit_has_nothing_left(tmp_path):
    write_group(tmp_path, 2, 1000, 1200, 100)
    assert list(free_in_groups(tmp_path)) == [0]


def test_no_group_and_no_limit(tmp_path):
    assert list(free_in_groups(tmp_path)) == []
    write_group(tmp_path, 2, "max", 900, 300)
    assert list(free_in_groups(tmp_path)) == []
