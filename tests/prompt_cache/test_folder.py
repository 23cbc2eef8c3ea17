"""The prompt cache's folder: size limit, LRU eviction, permissions and entries."""

import errno
import hashlib
import os
import time

import pytest
import torch

from offload.errors import Degraded
from offload.parallel.shard import Alone
from offload.prompt_cache import writer
from offload.prompt_cache.block import write_block
from offload.prompt_cache.entries import entries
from offload.prompt_cache.fingerprint import TOKENS
from offload.prompt_cache.folder import Header, PromptFolder, read_header
from tests.support.models import ids
from tests.support.prompt_cache import LENGTH, complaints, engine_on, files, said


def test_files_are_accessible_to_the_owner_only(model_dir, home):
    before = os.umask(0)
    try:
        engine = engine_on(model_dir, home)
        engine.prompts.label = os.fsdecode(b"caf\xe9.txt")  # file names need not be UTF-8
        said(engine, ids(LENGTH))
    finally:
        os.umask(before)
    for path in home.glob("**/*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    facts = read_header(files(home)[0])
    assert (facts.model, facts.label, facts.parent) == ("tiny", "caf?.txt", "")


def test_least_recently_used_blocks_are_evicted_first_and_the_last_of_a_prompt_before_its_first(model_dir, home):
    said(engine_on(model_dir, home), ids(LENGTH))
    size = files(home)[0].stat().st_size
    for path in files(home):
        os.utime(path, (1000, 1000))
    engine = engine_on(model_dir, home, limit=10 * size + 1000)
    assert said(engine, ids(LENGTH, 1))[1] == 0
    left = sorted(int(path.name[:6]) for path in files(home) if path.stat().st_mtime == 1000)
    assert left == list(range(len(left))) and 1 <= len(left) <= 3
    assert len({path.stat().st_mtime for path in files(home)}) == 2  # all blocks of a prompt have one time of use
    with pytest.warns(Degraded, match="limit"):
        said(engine_on(model_dir, home, limit=3 * size), ids(LENGTH, 2))
    assert len(files(home)) <= 3


def test_a_prompt_larger_than_the_limit_evicts_no_others(model_dir, home):
    said(engine_on(model_dir, home), ids(LENGTH))
    for path in files(home):
        os.utime(path, (1000, 1000))
    limit = sum(path.stat().st_size for path in files(home)) + 1000
    with pytest.warns(Degraded, match="limit"):
        said(engine_on(model_dir, home, limit=limit), ids(3 * LENGTH, 1))
    assert len(files(home)) >= 7  # the blocks that were saved before the size was known stay too


def test_shrinking_a_folder_and_what_killed_processes_have_left(model_dir, home):
    for seed in range(3):
        said(engine_on(model_dir, home), ids(LENGTH, seed))
        for path in files(home):
            if path.stat().st_mtime > 1e6:
                os.utime(path, (100 * seed, 100 * seed))
    store, folder = PromptFolder(home), files(home)[0].parent
    sizes = [sum(block.size for block in store.blocks() if block.used == used) for used in (0, 100, 200)]
    for name, used in ((".part-old", 0), (".part-new", time.time())):
        (folder / name).write_bytes(b"half")
        os.utime(folder / name, (used, used))
    assert store.shrink(0, before=100) == sizes[0] > 0
    assert [path.name for path in folder.glob(".part-*")] == [".part-new"]  # which somebody may be writing
    assert store.shrink(sizes[2]) == sizes[1]
    assert store.clear() == sizes[2]
    assert list(home.glob("*/")) == []


def test_the_limit_is_that_of_all_ranks_of_a_machine(model_dir, home, monkeypatch):
    """Each of them writes as much, into the same folder."""
    said(engine_on(model_dir, home), ids(LENGTH))
    limit = int(5.5 * files(home)[0].stat().st_size)
    PromptFolder(home).clear()
    engine = engine_on(model_dir, home, limit=limit)
    engine.prompts.group = Alone()
    engine.prompts.group.mates = 2

    def write_as_both(path, *rest):
        (other := home / "of the other rank").mkdir(exist_ok=True)
        write_block(other / path.name, *rest)
        return write_block(path, *rest)

    monkeypatch.setattr(writer, "write_block", write_as_both)
    with pytest.warns(Degraded, match="limit"):
        said(engine, ids(LENGTH))
    assert len(files(home)) == 4
    assert sum(path.stat().st_size for path in files(home)) <= limit


def test_a_folder_that_may_only_be_read_is_used_and_said_once(model_dir, home, monkeypatch):
    def refuse(path, *_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    said(engine_on(model_dir, home), ids(LENGTH))
    there = files(home)
    monkeypatch.setattr("offload.prompt_cache.block.replace_file", refuse)
    engine = engine_on(model_dir, home)
    with pytest.warns(Degraded, match="Permission denied") as warned:
        assert [said(engine, ids(LENGTH, seed))[1] for seed in range(3)] == [7 * TOKENS, 0, 0]
    assert len(complaints(warned)) == 1
    assert files(home) == there


def test_many_questions_on_one_document_are_one_entry(home):
    store, kv = PromptFolder(home), torch.zeros(1, 1, TOKENS, 2, 1)
    store.make("f" * 16)

    def name(text):
        return hashlib.sha256(text.encode()).hexdigest()

    def put(index, key, parent):
        header = Header(name(key), name(parent) if parent else "", "", "m", "", 1.0)
        write_block(store.block("f" * 16, index, name(key)), header, {"kv": kv})

    for index in range(60):
        put(index, f"a{index}", f"a{index - 1}" if index else "")
    for number in range(40):
        put(60, f"q{number}", "a59")
    put(1, "b1", "a0")  # another document with the same beginning
    found = entries(store)
    assert sorted((entry.prompts, len(entry.blocks)) for entry in found) == [(1, 2), (40, 100)]
