"""Stores of blocks that machines share: what is fetched is what was saved, and no fault of a store ends a run."""

import errno
import os
import threading
import time

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from offload.errors import Degraded
from offload.prompt_cache import store as stores
from offload.prompt_cache.store import BlockStore
from tests.support.command import assert_error
from tests.support.models import FAMILY_CASES, ids, make_hf_model
from tests.support.prompt_cache import LENGTH, complaints, engine_on, files, said

BLOCKS = LENGTH // 128


class Faulty(MemoryFileSystem):
    """A store in memory whose calls go through `fault`, with the bytes that are read."""

    protocol = "faulty"
    store, pseudo_dirs = {}, [""]
    calls, fault = [], staticmethod(lambda call, data: data)

    def cat_file(self, path, *more, **options):
        self.calls.append("get")
        data = super().cat_file(path, *more, **options) if super().exists(path) else None
        data = self.fault("get", data)
        if data is None:
            raise FileNotFoundError(path)
        return data

    def pipe_file(self, path, value, *more, **options):
        self.calls.append("put")
        super().pipe_file(path, self.fault("put", value), *more, **options)

    def exists(self, path, **options):
        self.calls.append("exists")
        self.fault("exists", b"")
        return super().exists(path, **options)


fsspec.register_implementation("faulty", Faulty, clobber=True)


@pytest.fixture
def faults(monkeypatch):
    """Set what the calls of the store do, and return the calls so far."""
    monkeypatch.setattr(stores, "PAUSE", 0.001)
    Faulty.store.clear()
    Faulty.calls.clear()

    def set(fault):
        monkeypatch.setattr(Faulty, "fault", staticmethod(fault))
        return Faulty.calls

    return set


@pytest.fixture
def url():
    return "faulty://shared/prompts"


def stored(url):
    fs, root = fsspec.core.url_to_fs(url)
    return {path.rpartition("/")[2]: fs.cat_file(path) for path in fs.find(root)}


@pytest.mark.parametrize("protocol", ["memory", "file"])
def test_another_machine_restores_what_one_has_saved(machine, plain, tmp_path, protocol, recwarn):
    url = {"memory": "memory://shared/prompts", "file": f"file://{tmp_path}/mount/prompts"}[protocol]
    assert machine("a", url=url) == (plain, 0)
    saved = {path.name: path.read_bytes() for path in files(tmp_path / "a")}
    assert len(saved) == BLOCKS and stored(url) == saved
    assert machine("b", url=url) == (plain, 128 * BLOCKS)
    assert {path.name: path.read_bytes() for path in files(tmp_path / "b")} == saved
    assert machine("c", ids(LENGTH)[:500] + ids(100, 3), url=url)[1] == 384
    assert not complaints(recwarn)


def test_a_gap_in_the_folder_is_filled_and_nothing_is_asked_for_what_is_there(machine, plain, tmp_path, faults):
    calls = faults(lambda call, data: data)
    machine("a")
    assert calls.count("put") == BLOCKS
    files(tmp_path / "a")[2].unlink()
    calls.clear()
    assert machine("a") == (plain, 128 * BLOCKS)
    assert calls == ["get"]
    calls.clear()
    assert machine("a") == (plain, 128 * BLOCKS) and calls == []


def test_states_of_linear_attention_go_along(tmp_path, faults):
    family, changes = FAMILY_CASES["qwen3.5"]
    make_hf_model(family, **changes).save_pretrained(tmp_path / "model")
    prompt, results = ids(LENGTH), []
    for name in ("a", "b"):
        engine = engine_on(tmp_path / "model", tmp_path / name, store="faulty://states")
        results.append(said(engine, prompt))
        engine.prompts.store.drain()
    assert results[0][0] == results[1][0] and results[1][1] == 128 * BLOCKS


def broken(call, data):
    raise OSError("500 Internal Server Error")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (broken, "500 Internal Server Error"),
        (lambda call, data: data[:-100] if call == "get" else data, "checksum|damaged|different"),
        (lambda call, data: data[:-9] + b"wrong" + data[-4:] if call == "get" else data, "checksum"),
        (lambda call, data: b"" if call == "get" else data, "damaged"),
    ],
    ids=["errors", "cut", "wrong", "empty"],
)
def test_a_fault_is_one_warning_and_the_text_stays(machine, plain, tmp_path, faults, fault, reason):
    machine("a")
    calls = faults(fault)
    with pytest.warns(Degraded) as caught:
        assert machine("b") == (plain, 0)
    (message,) = set(complaints(caught))
    assert "the cache store faulty://shared/prompts is not used for all blocks" in message
    assert any(each in message for each in reason.split("|"))
    assert calls.count("get") >= 2  # tried again
    assert len(files(tmp_path / "b")) == BLOCKS


def test_what_is_damaged_in_the_store_is_replaced(machine, plain, faults):
    machine("a")
    good = dict(stored("faulty://shared/prompts"))
    first = min(Faulty.store)
    Faulty.store[first].seek(-300, os.SEEK_END)
    Faulty.store[first].write(b"damage")
    with pytest.warns(Degraded, match="checksum"):
        assert machine("b")[0] == plain
    replaced = stored("faulty://shared/prompts")
    assert replaced.keys() == good.keys() and machine("c") == (plain, 128 * BLOCKS)


def test_a_fault_that_passes_is_none(machine, plain, faults, recwarn):
    machine("a")
    left = ["503 Slow Down", "cut"]

    def fault(call, data):
        if call != "get" or not left or len(Faulty.calls) % 2 == 0:
            return data
        if (what := left.pop()) == "cut":
            return data[:100]
        raise OSError(what)

    calls = faults(fault)
    calls.clear()
    assert machine("b") == (plain, 128 * BLOCKS) and not left
    assert not complaints(recwarn)


def test_a_store_that_hangs_delays_a_prompt_by_a_bounded_time(machine, plain, faults, monkeypatch):
    machine("a")
    monkeypatch.setattr(stores, "PATIENCE", 0.1)
    monkeypatch.setattr(stores, "DRAIN", 0.1)
    ended, delays, plain_fetch = threading.Event(), [], BlockStore.fetch

    def timed(self, *more):
        start = time.monotonic()
        plain_fetch(self, *more)
        delays.append(time.monotonic() - start)

    monkeypatch.setattr(BlockStore, "fetch", timed)
    faults(lambda call, data: (ended.wait(60), data)[1])
    with pytest.warns(Degraded) as caught:
        assert machine("b") == (plain, 0)
    ended.set()
    messages = " ".join(str(each.message) for each in caught)
    assert "took more than 0.1 s" in messages and "7 blocks are left" in messages
    assert 0.1 <= delays[0] < 50


def test_a_store_that_fails_is_left_alone_for_a_while(machine, faults, model_dir, tmp_path, monkeypatch):
    calls = faults(broken)
    engine = engine_on(model_dir, tmp_path / "a", store="faulty://shared/prompts")

    def run(seed):
        said(engine, ids(200, seed))
        engine.prompts.store.drain()

    with pytest.warns(Degraded, match="500"):
        run(0)
    for seed in (1, 2, 3):
        run(seed)
    before = len(calls)
    run(9)
    assert len(calls) == before
    monkeypatch.setattr(stores.time, "monotonic", lambda now=time.monotonic: now() + stores.REST)
    said(engine, ids(200, 10))
    assert len(calls) > before


def test_two_writers_leave_sound_blocks(run_both, faults, plain, machine):
    barrier = threading.Barrier(2, timeout=60)
    faults(lambda call, data: (call == "exists" and barrier.wait(), data)[1])
    assert run_both() == [plain, plain]
    faults(lambda call, data: data)
    assert len(stored("faulty://shared/prompts")) == BLOCKS
    assert machine("c") == (plain, 128 * BLOCKS)


def test_fetched_blocks_stay_within_the_limit(machine, plain, tmp_path, faults):
    machine("a")
    size = files(tmp_path / "a")[0].stat().st_size
    with pytest.warns(Degraded, match="limit"):
        assert machine("b", limit=3 * size + 100)[0] == plain
    assert sum(path.stat().st_size for path in files(tmp_path / "b")) <= 3 * size + 100


def test_a_full_disk_is_a_warning(machine, plain, faults, monkeypatch):
    machine("a")

    def full(path, *data, sync):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(stores, "replace_file", full)
    with pytest.warns(Degraded, match="No space left on device"):
        assert machine("b") == (plain, 0)


@pytest.mark.parametrize("tries", [1, 99])
def test_a_put_that_fails_leaves_no_part_of_a_file(machine, plain, tmp_path, monkeypatch, recwarn, tries):
    """It looks like the whole block to the next try, and to other machines."""
    url, put, failed = f"file://{tmp_path}/mount", LocalFileSystem.pipe_file, []

    def full(self, path, value, *more, **options):
        put(self, path, value[:100])
        failed.append(path)
        if failed.count(path) <= tries:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        put(self, path, value)

    monkeypatch.setattr(stores, "PAUSE", 0.001)
    monkeypatch.setattr(LocalFileSystem, "pipe_file", full)
    assert machine("a", url=url) == (plain, 0)
    whole = {path.name: path.read_bytes() for path in files(tmp_path / "a")}
    assert stored(url) == (whole if tries == 1 else {})
    assert ["No space left" in each for each in complaints(recwarn)] == ([] if tries == 1 else [True])


@pytest.mark.parametrize("url", ["", "bucket/prefix", "s3://", "nothing://bucket/prefix", "://x", "file://host/folder"])
def test_what_is_no_store_is_an_error_before_the_model_is_loaded(triforce_here, url):
    result = triforce_here("generate", "Hello", "--cache", f"--cache-store={url}")
    assert_error(result, 2, f"--cache-store {url}", "s3://bucket/prefix")


@pytest.mark.parametrize("off", [("--no-cache",), ("--cache", "--cache-limit", "0")])
def test_nothing_to_share_is_an_error(triforce_here, off):
    result = triforce_here("generate", "Hello", *off, "--cache-store", "s3://bucket/prefix")
    assert_error(result, 2, "--cache-store shares cached prompts", off[-1])


def test_a_url_with_a_password_is_refused_and_not_shown(triforce_here):
    result = triforce_here("generate", "Hello", "--cache", "--cache-store", "sftp://me:secret@host/prompts")
    assert_error(result, 2, "a password in it", "in the environment")
    assert "secret" not in result.stdout + result.stderr


def test_a_protocol_without_its_package(triforce_here, monkeypatch):
    def missing(protocol):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    result = triforce_here("generate", "Hello", "--cache", "--cache-store", "s3://bucket/prefix")
    assert_error(result, 2, "Install s3fs", '".[store]"')


def test_the_command_shares_prompts(triforce_here, tmp_path, monkeypatch):
    args = (
        "generate",
        "Once upon a time. " * 40,
        "-n",
        "4",
        "--temperature",
        "0",
        "--cache",
        "--cache-store",
        "memory://command",
    )
    first = triforce_here(*args)
    assert first.returncode == 0 and "from the cache" not in first.stderr
    monkeypatch.setenv("TRIFORCE_HOME", str(tmp_path / "other"))
    again = triforce_here(*args)
    assert again.stdout == first.stdout and "from the cache" in again.stderr, again.stderr
