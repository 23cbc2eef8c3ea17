"""Blocks that are damaged, of another prompt, truncated by a kill or a full disk, or written by two processes."""

import random
import shutil
import time

import pytest

from offload.errors import Degraded
from offload.prompt_cache.fingerprint import TOKENS
from tests.support.models import ids
from tests.support.prompt_cache import LENGTH, Process, engine_on, files, said


def damaged(data, rng):
    """Return the bytes with a bit flipped, or a part cut off, left out or replaced."""
    place, kind = rng.randrange(len(data)), rng.randrange(4)
    if kind == 0:
        return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]
    if kind == 1:
        return data[:place]
    if kind == 2:
        return data[:place] + data[place + rng.randrange(1, 99) :]
    return data[:place] + rng.randbytes(50) + data[place + 50 :]


def test_flipped_and_missing_bytes_are_detected(model_dir, home):
    prompt, rng = ids(LENGTH), random.Random(0)
    expected, _ = said(engine_on(model_dir, None), prompt)
    said(engine_on(model_dir, home), prompt)
    whole = [path.read_bytes() for path in files(home)]
    engine = engine_on(model_dir, home)
    for _ in range(12):
        index = rng.randrange(len(whole))
        path = files(home)[index]
        data = damaged(whole[index], rng)
        if data == whole[index]:
            continue
        path.write_bytes(data if rng.random() < 0.7 else damaged(whole[index], rng)[: rng.randrange(3000)])
        engine.release()  # nothing in memory
        with pytest.warns(Degraded, match="not used"):
            answer = said(engine, prompt)
        assert answer == (expected, 6 * TOKENS)  # all but the damaged one
        assert path.read_bytes() != data  # it has been replaced
        engine.release()
        assert said(engine, prompt) == (expected, 7 * TOKENS)


def test_the_file_of_another_block_is_not_restored(model_dir, home):
    prompt = ids(LENGTH)
    expected, _ = said(engine_on(model_dir, None), prompt)
    said(engine_on(model_dir, home), prompt)
    first, second, *_ = files(home)
    shutil.copy(second, first)
    with pytest.warns(Degraded, match="a different block"):
        assert said(engine_on(model_dir, home), prompt) == (expected, 6 * TOKENS)
    shutil.copy(model_dir / "model.safetensors", second)
    with pytest.warns(Degraded, match="a different block"):
        assert said(engine_on(model_dir, home), prompt) == (expected, 6 * TOKENS)
    second.unlink()
    second.mkdir()
    with pytest.warns(Degraded, match="not used|not saved"):
        assert said(engine_on(model_dir, home), prompt) == (expected, 6 * TOKENS)


@pytest.mark.long
def test_after_a_kill_at_any_moment_the_next_run_has_the_same_output(model_dir, home, tmp_path):
    prompt = ids(3000)
    expected, _ = said(engine_on(model_dir, None), prompt)
    rehearsal = Process(model_dir, tmp_path / "rehearsal", prompt)
    start = time.perf_counter()
    rehearsal.answer()
    took, rng, there = time.perf_counter() - start, random.Random(0), 0
    for _ in range(20):
        Process(model_dir, home, prompt).kill(rng.random() * took / 4)
        assert len(files(home)) >= there, "saved blocks must not be lost"
        there = len(files(home))
    tokens, restored, warned = Process(model_dir, home, prompt).answer()
    assert tokens == expected
    assert restored >= min(there, 2999 // TOKENS) * TOKENS
    assert not warned
    assert said(engine_on(model_dir, home), prompt) == (expected, 2999 // TOKENS * TOKENS)


def test_two_processes_at_once(model_dir, home):
    prompt = ids(2000)
    expected, _ = said(engine_on(model_dir, None), prompt)
    for _ in range(3):
        both = [Process(model_dir, home, prompt) for _ in range(2)]
        for tokens, _, warned in [each.answer() for each in both]:
            assert tokens == expected
            assert not warned


def test_a_full_disk_is_a_warning(model_dir, home):
    prompt = ids(LENGTH)
    expected, _ = said(engine_on(model_dir, None), prompt)
    tokens, restored, warned = Process(model_dir, home, prompt, largest_file=20_000).answer()
    assert (tokens, restored) == (expected, 0)
    assert len(warned) == 1
    assert "File too large" in warned[0]
    assert files(home) == [] == list(home.glob("*/.part-*"))


def test_a_folder_that_cannot_be_made_is_a_warning(model_dir, home):
    engine = engine_on(model_dir, home)
    shutil.rmtree(home)
    home.write_text("a file")
    expected, _ = said(engine_on(model_dir, None), ids(LENGTH))
    with pytest.warns(Degraded, match="not saved any further"):
        assert said(engine, ids(LENGTH)) == (expected, 0)
