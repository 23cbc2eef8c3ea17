"""Blocks that are damaged, missing, cut by a kill or a full disk: the output stays, and they are saved again."""

import random
import shutil
import time
import warnings

import pytest
import torch

from offload import GenerationConfig, Sampling
from offload.errors import Degraded
from offload.events import Prefilled
from offload.prompt_cache import writer as saving
from offload.prompt_cache.fingerprint import TOKENS
from tests.support.models import ids
from tests.support.prompt_cache import LENGTH, Process, complaints, engine_on, files, said, spoil, tensors


@pytest.fixture
def expected(model_dir):
    return said(engine_on(model_dir, None), ids(LENGTH))[0]


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


def test_a_damaged_block_ends_the_restoration_and_is_saved_again(model_dir, home, expected):
    rng = random.Random(0)
    said(engine_on(model_dir, home), ids(LENGTH))
    whole, before = [path.read_bytes() for path in files(home)], tensors(home)
    engine = engine_on(model_dir, home)
    for index in (0, 3, 6, 3, 5):
        while (data := damaged(whole[index], rng)) == whole[index]:
            pass
        files(home)[index].write_bytes(data)
        engine.release()  # nothing in memory
        with pytest.warns(Degraded, match="is damaged") as warned:
            assert said(engine, ids(LENGTH)) == (expected, index * TOKENS)
        assert len(complaints(warned)) == 1
        assert tensors(home) == before
    engine.release()
    assert said(engine, ids(LENGTH)) == (expected, 7 * TOKENS)


def test_a_missing_block_ends_the_restoration_without_a_warning(model_dir, home, expected, recwarn):
    said(engine_on(model_dir, home), ids(LENGTH))
    files(home)[2].unlink()
    assert said(engine_on(model_dir, home), ids(LENGTH)) == (expected, 2 * TOKENS)
    assert said(engine_on(model_dir, home), ids(LENGTH)) == (expected, 7 * TOKENS)
    assert not complaints(recwarn)


def test_the_file_of_another_block_is_not_restored(model_dir, home, expected):
    said(engine_on(model_dir, home), ids(LENGTH))
    first, second, *_ = files(home)
    for other in (second, model_dir / "model.safetensors"):
        shutil.copy(other, first)
        with pytest.warns(Degraded, match="a different block"):
            assert said(engine_on(model_dir, home), ids(LENGTH)) == (expected, 0)


def test_with_torch_the_rest_of_the_prefill_begins_at_a_chunk_border(model_dir, home):
    """Blocks are restored in groups of four, for other chunks would round differently."""
    said(engine_on(model_dir, home, chunk=512), ids(LENGTH))
    spoil(files(home)[2])
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Degraded)
        answer = said(engine_on(model_dir, home, chunk=512), ids(LENGTH), on_event=seen.append)
    assert answer == (said(engine_on(model_dir, None, chunk=512), ids(LENGTH))[0], 0)
    assert [event.done for event in seen if isinstance(event, Prefilled) and event.done] == [512, LENGTH]


def test_an_interrupt_keeps_the_blocks_that_were_run(model_dir, home, expected):
    events = engine_on(model_dir, home).generate(ids(LENGTH), Sampling(temperature=0), GenerationConfig())
    while next(events).done < 5 * TOKENS:
        pass
    events.close()
    assert (there := len(files(home))) in (4, 5)
    assert said(engine_on(model_dir, home), ids(LENGTH)) == (expected, there * TOKENS)


@pytest.mark.long
def test_a_full_disk_is_a_warning(model_dir, home, expected):
    tokens, restored, warned = Process(model_dir, home, ids(LENGTH), largest_file=20_000).answer()
    assert (tokens, restored) == (expected, 0)
    assert len(warned) == 1 and "File too large" in warned[0]
    assert files(home) == [] == list(home.glob("*/.part-*"))


def test_a_folder_that_cannot_be_made_is_one_warning(model_dir, home, expected):
    engine = engine_on(model_dir, home)
    shutil.rmtree(home)
    home.write_text("a file")
    with pytest.warns(Degraded, match="not saved any further") as warned:
        answers = [said(engine, ids(LENGTH, seed)) for seed in (0, 1)]
    assert answers[0] == (expected, 0)
    assert len(complaints(warned)) == 1


def test_a_folder_that_vanishes_under_a_run_changes_no_output(model_dir, home, expected):
    seen = []

    def remove(event):
        seen.append(event)
        if len(seen) in (3, 8):
            shutil.rmtree(home, ignore_errors=True)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Degraded)
        assert said(engine_on(model_dir, home), ids(LENGTH), on_event=remove)[0] == expected
    said(engine_on(model_dir, home), ids(LENGTH))
    assert said(engine_on(model_dir, home), ids(LENGTH)) == (expected, 7 * TOKENS)


def test_saving_stops_on_a_disk_that_is_slower_than_the_prefill(model_dir, home, monkeypatch):
    limit = saving.BlockWriter._limit_delay
    monkeypatch.setattr(saving.BlockWriter, "_limit_delay", lambda writer, _: limit(writer, 10.0))  # of any machine
    monkeypatch.setattr(saving, "PATIENCE", 15.0)
    expected, _ = said(engine_on(model_dir, None), ids(3 * LENGTH))
    with pytest.warns(Degraded, match="slower than the prefill"):
        assert said(engine_on(model_dir, home), ids(3 * LENGTH))[0] == expected
    assert 0 < len(files(home)) < 20


# Several processes -------------------------------------------------------------------------------------------------


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


def test_a_restored_cache_has_the_bits_of_a_computed_one_after_damage(model_dir, home, operations):
    said(engine_on(model_dir, home, operations=operations, dtype=torch.bfloat16), ids(LENGTH))
    spoil(files(home)[4])
    both = [engine_on(model_dir, each, operations=operations, dtype=torch.bfloat16) for each in (home, None)]
    with pytest.warns(Degraded):
        assert len({tuple(said(each, ids(LENGTH))[0]) for each in both}) == 1
    ours, theirs = (each.idle_session.full.cache.store.read(0, LENGTH) for each in both)
    assert all(map(torch.equal, ours, theirs))
