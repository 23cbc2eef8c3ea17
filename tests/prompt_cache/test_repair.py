"""Damaged blocks: one run repairs all of them, and restores the valid blocks after them."""

import math
import os
import warnings

import pytest
import torch

from offload import GenerationConfig, Sampling
from offload.errors import Degraded
from offload.loading.weights_digest import weights_digest
from offload.prompt_cache import restore as restoring
from offload.prompt_cache import writer as saving
from offload.prompt_cache.fingerprint import TOKENS
from offload.speculation.passes.runner import Runner
from tests.support.models import ids
from tests.support.offloading import SmallPages
from tests.support.prompt_cache import CHUNK, LENGTH, NEW, complaints, engine_on, files, said, spoil, tensors


@pytest.mark.daily("torch-64-512-3", "native-*-900-*")
@pytest.mark.parametrize(("chunk", "length", "read"), [(CHUNK, LENGTH, 7), (512, LENGTH, 4), (CHUNK, 4 * TOKENS, 3)])
def test_one_run_repairs_all_damaged_blocks(model_dir, home, operations, chunk, length, read):
    """Also the last block of a prompt of whole blocks, which is not restored because the last token must be run."""
    if operations.kernel and chunk == 512:
        read = 7
    prompt = ids(length)
    expected, _ = said(engine_on(model_dir, home, operations=operations, chunk=chunk), prompt)
    whole = tensors(home)
    for path in files(home):
        spoil(path)
    with pytest.warns(Degraded, match=f"{read} files of the prompt cache are not used, the first: .*/0000") as warned:
        assert said(engine_on(model_dir, home, operations=operations, chunk=chunk), prompt) == (expected, 0)
    assert len(complaints(warned)) == 1
    assert tensors(home) == whole
    with warnings.catch_warnings():
        warnings.simplefilter("error", Degraded)
        answer = said(engine_on(model_dir, home, operations=operations, chunk=chunk), prompt)
    assert answer == (expected, read * TOKENS)


@pytest.mark.daily("native-*None-*", "torch-96-bad1*")
@pytest.mark.parametrize(
    ("settings", "dtype"), [(None, torch.float32), (SmallPages("stream", 0, page_tokens=192), torch.bfloat16)]
)
@pytest.mark.parametrize(("chunk", "bad"), [(CHUNK, {0, 3, 6}), (96, {1, 2}), (96, {5}), (CHUNK, {1, 2, 5})])
def test_valid_blocks_after_damaged_ones_are_restored(model_dir, home, operations, settings, dtype, chunk, bad):
    def engine(where):
        return engine_on(model_dir, where, settings, operations, dtype, chunk=chunk)

    prompt = ids(LENGTH)
    said(engine(home), prompt)
    whole, unit = tensors(home), 1 if operations.kernel else math.lcm(chunk, TOKENS) // TOKENS
    lost = {index // unit for index in bad}
    for index in bad:
        spoil(files(home)[index])
    both = engine(home), engine(None)
    with pytest.warns(Degraded, match="not used"):
        answer = said(both[0], prompt)
    assert answer == (said(both[1], prompt)[0], (len(whole) - unit * len(lost)) * TOKENS)
    ours, theirs = (each.idle_session.full.cache.store.read(0, LENGTH) for each in both)
    assert all(map(torch.equal, ours, theirs))
    assert tensors(home) == whole


@pytest.mark.daily("torch-96-missing2", "native-64-*")
@pytest.mark.parametrize(("chunk", "missing"), [(CHUNK, {0, 3}), (CHUNK, {1, 2, 5}), (96, {1}), (CHUNK, {4, 6})])
def test_missing_blocks_are_computed_and_those_after_them_restored(
    model_dir, home, operations, monkeypatch, chunk, missing
):
    prompt = ids(LENGTH)
    expected, _ = said(engine_on(model_dir, home, operations=operations, chunk=chunk), prompt)
    whole, unit = tensors(home), 1 if operations.kernel else math.lcm(chunk, TOKENS) // TOKENS
    for path in [files(home)[index] for index in missing]:
        path.unlink()
    computed = {index // unit for index in missing}
    run, lengths = Runner.step, []
    monkeypatch.setattr(Runner, "step", lambda self, x: (lengths.append(len(x)), run(self, x))[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error", Degraded)
        answer = said(engine_on(model_dir, home, operations=operations, chunk=chunk), prompt)
    assert answer == (expected, (len(whole) // unit - len(computed)) * unit * TOKENS)
    decoded = 0 if operations.kernel else NEW - 1  # a recorded pass is no step
    assert sum(lengths) - decoded == LENGTH - answer[1]
    assert tensors(home) == whole


def test_questions_on_a_document_in_memory_repair_their_own_blocks(model_dir, home, native_operations):
    document, ends = ids(LENGTH), (ids(300, 1), ids(300, 2))
    engine = engine_on(model_dir, home, operations=native_operations, room=2000)
    expected = [said(engine, document + end)[0] for end in ends]
    whole = tensors(home)
    for path in files(home)[7:]:
        spoil(path)
    engine = engine_on(model_dir, home, operations=native_operations, room=2000)
    with pytest.warns(Degraded, match="not used") as warned:
        assert [said(engine, document + end)[0] for end in ends] == expected
    assert len(complaints(warned)) == 2
    assert tensors(home) == whole


def test_a_valid_cache_is_read_once_and_not_written(model_dir, home, monkeypatch):
    prompt = ids(LENGTH)
    said(engine_on(model_dir, home), prompt)
    reads, read = [], restoring.Prompt.read
    monkeypatch.setattr(restoring.Prompt, "read", lambda self, *args: (reads.append(args[0]), read(self, *args))[1])
    monkeypatch.setattr(saving, "write_block", lambda *args: pytest.fail("a valid block is written again"))
    assert said(engine_on(model_dir, home), prompt)[1] == 7 * TOKENS
    assert sorted(reads) == list(range(7))
    assert said(engine_on(model_dir, home), prompt[:500])[1] == 3 * TOKENS


def test_damaged_blocks_are_read_once(model_dir, home, monkeypatch):
    prompt = ids(LENGTH)
    said(engine_on(model_dir, home), prompt)
    for index in (1, 2, 4):
        spoil(files(home)[index])
    reads, read = [], restoring.Prompt.read
    monkeypatch.setattr(restoring.Prompt, "read", lambda self, *args: (reads.append(args[0]), read(self, *args))[1])
    written, write = [], saving.write_block
    monkeypatch.setattr(saving, "write_block", lambda path, *args: (written.append(path), write(path, *args))[1])
    with pytest.warns(Degraded, match="3 files"):
        said(engine_on(model_dir, home), prompt)
    assert sorted(reads) == list(range(7))
    assert written == [files(home)[index] for index in (1, 2, 4)]


def test_an_interrupt_during_repair_keeps_the_computed_blocks(model_dir, home):
    prompt = ids(LENGTH)
    said(engine_on(model_dir, home), prompt)
    whole = tensors(home)
    for path in files(home)[:6]:
        spoil(path)
    events = engine_on(model_dir, home).generate(prompt, Sampling(temperature=0), GenerationConfig())
    while next(events).done < 4 * TOKENS:
        pass
    events.close()
    assert tensors(home)[:3] == whole[:3]
    assert tensors(home)[5] != whole[5]
    with pytest.warns(Degraded, match="not used"):
        assert said(engine_on(model_dir, home), prompt)[1] in (4 * TOKENS, 5 * TOKENS)
    assert tensors(home) == whole


def test_a_pipe_at_the_path_of_a_block_counts_as_damage(model_dir, home):
    """The same for the file of weight digests. Opening a pipe would wait for a writer without end."""
    prompt = ids(LENGTH)
    expected, _ = said(engine_on(model_dir, home), prompt)
    path = files(home)[2]
    path.unlink()
    os.mkfifo(path)
    with pytest.warns(Degraded, match=f"{path}: it is not a regular file"):
        assert said(engine_on(model_dir, home), prompt) == (expected, 6 * TOKENS)
    os.mkfifo(notes := home / "pipe.json")
    assert weights_digest([path], notes) == weights_digest([path], home / "notes.json")
