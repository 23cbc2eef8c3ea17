"""The prompt cache's folder: size limit, LRU eviction and permissions."""

import os
import time

import pytest

from offload.errors import Degraded
from offload.prompt_cache.folder import PromptFolder
from offload.prompt_cache.header import read_header
from tests.support.models import ids
from tests.support.prompt_cache import LENGTH, engine_on, files, said


def test_files_are_accessible_to_the_owner_only(model_dir, home):
    os.umask(0)
    try:
        said(engine_on(model_dir, home), ids(LENGTH))
        said(engine_on(model_dir, home), ids(LENGTH))
    finally:
        os.umask(0o022)
    for path in home.glob("**/*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    facts = read_header(files(home)[0])
    assert (facts.model, facts.label, facts.parent) == ("tiny", "a prompt", "")
    assert facts.prefill_s > 0


def test_least_recently_used_blocks_are_evicted_first_and_the_last_of_a_prompt_before_its_first(model_dir, home):
    said(engine_on(model_dir, home), ids(LENGTH))
    size = files(home)[0].stat().st_size
    for path in files(home):
        os.utime(path, (1000, 1000))
    engine = engine_on(model_dir, home, limit=10 * size + 1000)
    assert said(engine, ids(LENGTH, 1))[1] == 0
    used = {path.stat().st_mtime for path in files(home)}
    left = sorted(int(path.name[:6]) for path in files(home) if path.stat().st_mtime == 1000)
    assert left == list(range(len(left)))
    assert 1 <= len(left) <= 3
    assert len(used) == 2  # all blocks of a prompt have one time of use
    with pytest.warns(Degraded, match="limit"):
        said(engine_on(model_dir, home, limit=3 * size), ids(LENGTH, 2))
    assert len(files(home)) <= 3


def test_what_a_killed_process_has_left_is_removed_when_the_next_prompt_is_saved(model_dir, home):
    said(engine_on(model_dir, home), ids(LENGTH))
    folder = files(home)[0].parent
    for name, used in ((".part-old", 0), (".part-new", time.time())):
        (folder / name).write_bytes(b"half")
        os.utime(folder / name, (used, used))
    said(engine_on(model_dir, home), ids(LENGTH))  # nothing is to be saved
    assert (folder / ".part-old").exists()
    said(engine_on(model_dir, home), ids(LENGTH, 1))
    assert [path.name for path in folder.glob(".part-*")] == [".part-new"]  # which somebody may be writing


def test_shrinking_a_folder(model_dir, home):
    for seed in range(3):
        said(engine_on(model_dir, home), ids(LENGTH, seed))
        for path in files(home):
            if path.stat().st_mtime > 1e6:
                os.utime(path, (100 * seed, 100 * seed))
    store = PromptFolder(home)
    sizes = [sum(block.size for block in store.blocks() if block.used == used) for used in (0, 100, 200)]
    (stale := files(home)[0].parent / ".part-xyz").write_bytes(b"half")
    os.utime(stale, (0, 0))
    assert store.shrink(0, before=100) == sizes[0] > 0
    assert not stale.exists()
    assert store.shrink(sizes[2]) == sizes[1]
    assert store.clear() == sizes[2]
    assert list(home.glob("*/*")) == []
