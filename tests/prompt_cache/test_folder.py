"""The prompt cache's folder: size limit, LRU eviction and permissions."""

import errno
import os
import shutil
import time

import pytest

from offload.errors import Degraded
from offload.parallel.shard import Alone
from offload.prompt_cache import writer
from offload.prompt_cache.block import write_block
from offload.prompt_cache.entries import entries
from offload.prompt_cache.fingerprint import TOKENS
from offload.prompt_cache.folder import PromptFolder, read_header
from tests.support.models import ids
from tests.support.prompt_cache import LENGTH, complaints, engine_on, files, said
from tests.support.vanishing import vanish_when_listed
from triforce_cli.run.prompt_cache import details, entries_table


def test_files_are_accessible_to_the_owner_only(model_dir, home):
    before = os.umask(0)
    try:
        said(engine_on(model_dir, home), ids(LENGTH))
        said(engine_on(model_dir, home), ids(LENGTH))
    finally:
        os.umask(before)
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


def test_two_writers_keep_to_the_limit_together(model_dir, home, monkeypatch):
    """A writer measures the folder again, where others write too."""
    said(engine_on(model_dir, home), ids(LENGTH))
    limit, other = sum(path.stat().st_size for path in files(home)) + 1000, engine_on(model_dir, home, limit=1 << 30)
    PromptFolder(home).clear()
    written = []

    def write_and_let_another_write(path, *rest):
        written.append(path)
        if len(written) == 3:
            said(other, ids(LENGTH, 1))
        return write_block(path, *rest)

    monkeypatch.setattr(writer, "write_block", write_and_let_another_write)
    said(engine_on(model_dir, home, limit=limit), ids(LENGTH))
    assert len({path.parent for path in written}) == 1
    assert len(written) > 10  # of both
    assert sum(path.stat().st_size for path in files(home)) <= limit


# Clocks ------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("when", [4e9, 1e15, -1e9])
def test_times_that_cannot_be(model_dir, home, when):
    """A clock was ahead and is set back, or was never set."""
    said(engine_on(model_dir, home), ids(LENGTH))
    for path in (*files(home), stale := files(home)[0].with_name(".part-xyz")):
        path.touch()
        os.utime(path, (when, when))
    store, now = PromptFolder(home), time.time()
    (entry,) = entries(store)
    assert "tokens" in details(entry, now)
    assert entry.id in entries_table([entry], store, now, 80).plain
    assert store.shrink(0, before=now - 60) == (entry.size if when < now else 0)
    said(engine_on(model_dir, home, limit=entry.size + 1000), ids(LENGTH, 1))
    assert all(block.used <= time.time() for block in store.blocks())  # those ahead age from now on
    assert not stale.exists()
    store.clear()
    assert list(home.glob("*/*")) == []


# Folders -----------------------------------------------------------------------------------------------------------


def test_why_prompts_are_not_saved_is_said_once(model_dir, home, monkeypatch):
    """As of a folder that may only be read: what is there is used."""

    def refuse(path, *_):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    said(engine_on(model_dir, home), ids(LENGTH))
    there = files(home)
    monkeypatch.setattr("offload.prompt_cache.block.replace_file", refuse)
    engine = engine_on(model_dir, home)
    with pytest.warns(Degraded, match="Permission denied") as warned:
        assert [said(engine, ids(LENGTH, seed))[1] for seed in range(3)] == [7 * TOKENS, 0, 0]
    assert len(complaints(warned)) == 1
    assert files(home) == there


@pytest.mark.parametrize("way", ["the folder", "an entry", "a circle"])
def test_symbolic_links_are_followed_and_removed_alone(model_dir, home, tmp_path, way):
    (real := tmp_path / "real").mkdir()
    if way == "the folder":
        home.symlink_to(real)
    expected, _ = said(engine_on(model_dir, home), ids(LENGTH))
    entry, restored, target = files(home)[2], 7 * TOKENS, real / "moved"
    if way == "an entry":
        entry.rename(target)
        entry.symlink_to(target)
    elif way == "a circle":
        entry.unlink()
        entry.symlink_to(entry.name)
        restored = 6 * TOKENS
        with pytest.warns(Degraded, match="not used"):
            assert said(engine_on(model_dir, home), ids(LENGTH)) == (expected, restored)
        assert not entry.is_symlink()  # it has been written anew
        return
    assert said(engine_on(model_dir, home), ids(LENGTH)) == (expected, restored)
    PromptFolder(home).clear()
    assert files(home) == []
    assert target.exists() is (way == "an entry")


def test_a_folder_that_vanishes_under_a_run_is_made_again(model_dir, home):
    seen = []

    def remove(event):
        seen.append(event)
        if len(seen) in (3, 8):
            shutil.rmtree(home, ignore_errors=True)

    expected, _ = said(engine_on(model_dir, None), ids(LENGTH))
    assert said(engine_on(model_dir, home), ids(LENGTH), on_event=remove)[0] == expected
    said(engine_on(model_dir, home), ids(LENGTH))  # what is missing is computed and saved
    assert said(engine_on(model_dir, home), ids(LENGTH)) == (expected, 7 * TOKENS)


def test_a_folder_that_vanishes_while_others_are_counted_is_passed_over(model_dir, home, monkeypatch):
    """Another process has removed it: it was empty."""
    said(engine_on(model_dir, home), ids(LENGTH))
    for vanishing in (home / "0", home / "z"):
        vanishing.mkdir()
        with monkeypatch.context() as patches:
            vanish_when_listed(vanishing, patches)
            store = PromptFolder(home)
            assert len(list(store.blocks())) == 7 and store.shrink(1 << 30) == 0
        assert not vanishing.exists()
