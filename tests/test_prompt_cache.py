"""Prompts that are kept on disk: the same output, whatever is found there, and whatever happens to it."""

import json
import os
import random
import shutil
import time

import pytest
import torch
from prompting import CHUNK, Process, engine_on, files, ids, said
from tiers import native_kernel
from tiny import make_hf_model

from offload import GenerationConfig, Sampling
from offload.errors import Degraded
from offload.events import Prefilled
from offload.kernels.native.library import PIECE
from offload.kernels.native.ops import NativeOperations
from offload.offloading import TierSettings
from offload.prompt_cache import restore as restoring
from offload.prompt_cache import writer as saving
from offload.prompt_cache.fingerprint import TOKENS, weights_digest
from offload.prompt_cache.folder import PromptFolder
from offload.prompt_cache.header import read_header
from offload.prompt_cache.restore import Race

LENGTH = 900  # 7 whole blocks
METHODS = ["ar", "lookup", "retrieval", "streaming", "triforce", "auto"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_read_from_disk_changes_nothing(model_dir, home, operations, dtype):
    prompt = ids(LENGTH)
    expected, _ = said(engine_on(model_dir, None, operations=operations, dtype=dtype), prompt)
    for restored in (0, 7 * TOKENS):
        engine = engine_on(model_dir, home, operations=operations, dtype=dtype)
        assert said(engine, prompt) == (expected, restored)
    assert len(files(home)) == 7


@pytest.mark.parametrize("method", METHODS)
def test_every_method_continues_behind_what_was_read(model_dir, home, method):
    prompt = ids(LENGTH)
    expected, _ = said(engine_on(model_dir, None), prompt)
    said(engine_on(model_dir, home), prompt)
    assert said(engine_on(model_dir, home), prompt, method) == (expected, 7 * TOKENS)


@pytest.mark.parametrize(("mode", "resident"), [("stream", 0), ("hybrid", 1), ("host", 0)])
def test_tiers_save_and_take_over(model_dir, home, operations, mode, resident):
    """Pieces of 192 tokens: their borders are not the blocks'."""
    if mode != "stream" and operations.kernel is None:
        pytest.skip("only the native kernel attends on the host")
    settings = TierSettings(mode, resident, page_tokens=192)
    first, second = ids(LENGTH), ids(500) + ids(400, 1)
    answers = [said(engine_on(model_dir, None, operations=operations), each)[0] for each in (first, second)]
    assert said(engine_on(model_dir, home, settings, operations), first) == (answers[0], 0)
    engine = engine_on(model_dir, home, settings, operations)
    assert said(engine, second) == (answers[1], 3 * TOKENS)
    assert said(engine, first) == (answers[0], 7 * TOKENS - 500)  # the others were in memory
    assert (
        said(engine_on(model_dir, home, operations=operations), second)[1] == 0
    )  # one cache rounds otherwise than pieces


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_tiers_save_serves_one_store_and_the_other_way_round(model_dir, tmp_path, dtype):
    """On the native kernel, where pieces are whole ones of its own: the bits are the same."""
    if native_kernel() is None:
        pytest.skip("there is no native kernel here")
    prompt, tiers = ids(LENGTH), TierSettings("hybrid", 1, page_tokens=PIECE)

    def engine(home, settings):
        return engine_on(model_dir, home, settings, NativeOperations(native_kernel()), dtype=dtype)

    expected, _ = said(engine(None, None), prompt)
    for number, order in enumerate(((tiers, None), (None, tiers))):
        home = tmp_path / str(number)
        assert [said(engine(home, each), prompt) for each in order] == [(expected, 0), (expected, 7 * TOKENS)]


def test_any_common_beginning_is_found(model_dir, home):
    document = ids(700)
    said(engine_on(model_dir, home), document + ids(100, 1))
    expected, _ = said(engine_on(model_dir, None), document + ids(200, 2))
    assert said(engine_on(model_dir, home), document + ids(200, 2)) == (expected, 5 * TOKENS)
    assert len(files(home)) == 6 + 2  # the common five are there once
    assert said(engine_on(model_dir, home), document[:300])[1] == 2 * TOKENS
    assert said(engine_on(model_dir, home), [5, *document])[1] == 0


def test_a_prompt_of_whole_blocks_still_runs_its_last_token(model_dir, home):
    prompt = ids(4 * TOKENS)
    expected, _ = said(engine_on(model_dir, None), prompt)
    said(engine_on(model_dir, home), prompt)
    assert said(engine_on(model_dir, home), prompt) == (expected, 3 * TOKENS)


def test_with_torch_the_rest_is_cut_as_without_a_cache(model_dir, home):
    """Other chunks would round otherwise."""
    prompt = ids(LENGTH)
    for chunk, restored in ((CHUNK, 7 * TOKENS), (3 * TOKENS, 6 * TOKENS), (1024, 0), (100, 0)):
        runs = []
        for _ in range(2):
            engine = engine_on(model_dir, home, chunk=chunk)
            runs.append([])
            said(engine, prompt, on_event=runs[-1].append)
        borders = [[event.done for event in run if isinstance(event, Prefilled)] for run in runs]
        assert borders[0][1] == 0  # of the blocks of other chunks none is taken
        after = borders[1][borders[1].index(restored) :]
        assert [done for done in borders[0] if done > restored] == [done for done in after if done > restored]


@pytest.mark.parametrize("change", ["weights", "dtype", "rope", "kernel"])
def test_what_was_computed_otherwise_is_not_taken(model_dir, home, tmp_path, change):
    prompt, options, other = ids(LENGTH), {}, model_dir
    said(engine_on(model_dir, home), prompt)
    if change == "dtype":
        options = {"dtype": torch.bfloat16}
    elif change == "kernel":
        if native_kernel() is None:
            pytest.skip("there is no native kernel here")
        options = {"operations": NativeOperations(native_kernel())}
    else:
        other, changes = tmp_path / "other", {"seed": 1}
        if change == "rope":
            changes = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}
        make_hf_model("llama", head_dim=32, **changes).save_pretrained(other)
    expected, _ = said(engine_on(other, None, **options), prompt)
    assert said(engine_on(other, home, **options), prompt) == (expected, 0)


def test_the_digest_of_weights_is_remembered_until_they_change(tmp_path):
    weights, notes = tmp_path / "weights", tmp_path / "notes"
    weights.write_bytes(b"one")
    first = weights_digest([weights], notes)
    note = json.loads(notes.read_text())
    assert weights_digest([weights], notes) == first
    assert json.loads(notes.read_text()) == note
    weights.write_bytes(b"two")
    assert weights_digest([weights], notes) != first
    for nonsense in (b"", b"[]", b"{", b'{"a": 3}', b"\xff", json.dumps({str(weights): [3, 4]}).encode()):
        notes.write_bytes(nonsense)
        assert weights_digest([weights], notes) != first


def test_files_are_their_owner_s_alone(model_dir, home):
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


# Damage -----------------------------------------------------------------------------------------------------------


def damaged(data, rng):
    """Bytes with one bit flipped, a piece cut off, left out, or replaced."""
    place, kind = rng.randrange(len(data)), rng.randrange(4)
    if kind == 0:
        return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]
    if kind == 1:
        return data[:place]
    if kind == 2:
        return data[:place] + data[place + rng.randrange(1, 99) :]
    return data[:place] + rng.randbytes(50) + data[place + 50 :]


def test_flipped_and_cut_bytes_are_noticed(model_dir, home):
    prompt, rng = ids(LENGTH), random.Random(0)
    expected, _ = said(engine_on(model_dir, None), prompt)
    said(engine_on(model_dir, home), prompt)
    whole = [path.read_bytes() for path in files(home)]
    engine = engine_on(model_dir, home)
    for _ in range(60):
        index = rng.randrange(len(whole))
        path = files(home)[index]
        data = damaged(whole[index], rng)
        if data == whole[index]:
            continue
        path.write_bytes(data if rng.random() < 0.7 else damaged(whole[index], rng)[: rng.randrange(3000)])
        engine._idle = None  # nothing in memory
        with pytest.warns(Degraded, match="not used"):
            answer = said(engine, prompt)
        assert answer == (expected, 6 * TOKENS)  # all but the damaged one
        assert path.read_bytes() != data  # it has been replaced
        engine._idle = None
        assert said(engine, prompt) == (expected, 7 * TOKENS)


def test_a_foreign_file_is_not_taken(model_dir, home):
    prompt = ids(LENGTH)
    expected, _ = said(engine_on(model_dir, None), prompt)
    said(engine_on(model_dir, home), prompt)
    first, second, *_ = files(home)
    shutil.copy(second, first)
    with pytest.warns(Degraded, match="something else"):
        assert said(engine_on(model_dir, home), prompt) == (expected, 6 * TOKENS)
    shutil.copy(model_dir / "model.safetensors", second)
    with pytest.warns(Degraded, match="something else"):
        assert said(engine_on(model_dir, home), prompt) == (expected, 6 * TOKENS)
    second.unlink()
    second.mkdir()
    with pytest.warns(Degraded, match="not used|not saved"):
        assert said(engine_on(model_dir, home), prompt) == (expected, 6 * TOKENS)


def test_killed_at_any_moment_the_next_run_says_the_same(model_dir, home, tmp_path):
    prompt = ids(3000)
    expected, _ = said(engine_on(model_dir, None), prompt)
    rehearsal = Process(model_dir, tmp_path / "rehearsal", prompt)
    start = time.perf_counter()
    rehearsal.answer()
    took, rng, there = time.perf_counter() - start, random.Random(0), 0
    for _ in range(20):
        Process(model_dir, home, prompt).kill(rng.random() * took / 4)
        assert len(files(home)) >= there, "what was saved stays"
        there = len(files(home))
    tokens, restored, warned = Process(model_dir, home, prompt).answer()
    assert tokens == expected
    assert restored >= min(there, 2999 // TOKENS) * TOKENS
    assert not warned
    assert said(engine_on(model_dir, home), prompt) == (expected, 2999 // TOKENS * TOKENS)


def test_what_was_read_before_an_interrupt_is_kept(model_dir, home):
    prompt = ids(LENGTH)
    expected, _ = said(engine_on(model_dir, None), prompt)
    events = engine_on(model_dir, home).generate(prompt, Sampling(temperature=0), GenerationConfig())
    while next(events).done < 5 * TOKENS:
        assert len(files(home)) < 6
    events.close()
    assert (there := len(files(home))) in (4, 5)
    assert said(engine_on(model_dir, home), prompt) == (expected, there * TOKENS)


def test_a_disk_that_is_slower_than_reading_is_left_behind(model_dir, home, monkeypatch):
    prompt = ids(3 * LENGTH)
    expected, _ = said(engine_on(model_dir, None), prompt)
    write = saving.write_block
    monkeypatch.setattr(saving, "write_block", lambda *args: (time.sleep(0.1), write(*args))[1])
    monkeypatch.setattr(saving, "PATIENCE", 0.2)
    with pytest.warns(Degraded, match="slower"):
        assert said(engine_on(model_dir, home), prompt)[0] == expected
    assert 0 < len(files(home)) < 20


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


# Room -------------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_go_first_and_the_end_before_the_beginning(model_dir, home):
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
    assert len(used) == 2  # each prompt's blocks count as used together
    with pytest.warns(Degraded, match="limit"):
        said(engine_on(model_dir, home, limit=3 * size), ids(LENGTH, 2))
    assert len(files(home)) <= 3


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


# Load or recompute ------------------------------------------------------------------------------------------------


def test_reading_that_takes_longer_than_computing_is_given_up(monkeypatch):
    monkeypatch.setattr(restoring, "TRIAL", 1.0)
    race = Race()
    for _ in range(4):
        race.observe(0.2, 0.1)
    assert not race.lost  # too early to tell
    race.observe(0.4, 0.1)
    assert race.lost
    race.observe(0.01, 1.0)
    assert not race.lost


def test_a_slow_disk_is_not_read_to_the_end(model_dir, home, monkeypatch):
    prompt = ids(LENGTH)
    expected, _ = said(engine_on(model_dir, home), prompt)
    read = restoring.Prompt.read
    monkeypatch.setattr(restoring.Prompt, "read", lambda *args: (time.sleep(0.15), read(*args))[1])
    monkeypatch.setattr(restoring, "TRIAL", 0.25)
    tokens, restored = said(engine_on(model_dir, home), prompt)
    assert tokens == expected
    assert restored == 2 * TOKENS
