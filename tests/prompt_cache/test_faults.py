"""Prompt caches with other processes, strange files and long sessions: no run fails, and no output changes."""

import hashlib
import os
import time

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from offload.errors import Degraded
from offload.events import Prefilled
from offload.model.decoder import Model
from offload.prompt_cache import restore as restoring
from offload.prompt_cache.block import write_block
from offload.prompt_cache.entries import entries
from offload.prompt_cache.fingerprint import TOKENS
from offload.prompt_cache.folder import Header, PromptFolder, UnusableBlock, read_header
from tests.support.models import ids, make_hf_model
from tests.support.offloading import SmallPages
from tests.support.prompt_cache import LENGTH, complaints, engine_on, files, said
from triforce_cli.run.prompt_cache import entries_table


@pytest.fixture
def starts(monkeypatch):
    """The cache lengths at which forward passes begin."""
    found, plain = [], Model.forward
    monkeypatch.setattr(Model, "forward", lambda self, x, cache: (found.append(cache.length), plain(self, x, cache))[1])
    return found


def engine_of(chunk, model_dir, home, settings=None, dtype=torch.float32):
    return engine_on(model_dir, home, settings, dtype=dtype, chunk=chunk)


def with_header(path, **changes):
    with safe_open(path, framework="pt") as file:
        texts = file.metadata()
    save_file(load_file(path), path, texts | changes)


def name(text):
    return hashlib.sha256(text.encode()).hexdigest()


# Other processes ---------------------------------------------------------------------------------------------------


def test_a_new_model_s_prompt_evicts_those_of_others_at_the_limit(model_dir, home, tmp_path, recwarn):
    (other := tmp_path / "other").mkdir()
    make_hf_model("llama", head_dim=32, seed=1).save_pretrained(other)
    said(engine_on(other, home), ids(LENGTH))
    limit = sum(path.stat().st_size for path in files(home)) + 1000
    for path in files(home):
        os.utime(path, (1000, 1000))
    said(engine_on(model_dir, home, limit=limit), ids(LENGTH))
    assert not complaints(recwarn)
    assert len([path for path in files(home) if path.stat().st_mtime > 1000]) == 7


def test_a_prompt_larger_than_the_limit_evicts_no_others(model_dir, home):
    said(engine_on(model_dir, home), ids(LENGTH))
    for path in files(home):
        os.utime(path, (1000, 1000))
    limit = sum(path.stat().st_size for path in files(home)) + 1000
    with pytest.warns(Degraded, match="limit"):
        said(engine_on(model_dir, home, limit=limit), ids(3 * LENGTH, 1))
    assert len(files(home)) >= 7  # the blocks that were saved before the size was known stay too


def test_clearing_the_cache_while_a_prompt_is_saved_does_not_end_the_run(model_dir, home):
    prompt, engine = ids(LENGTH), engine_on(model_dir, home)
    expected, _ = said(engine_on(model_dir, None), prompt)

    def clear(event):
        if isinstance(event, Prefilled):
            time.sleep(0.01)  # so that pending blocks are written
            PromptFolder(home).clear()

    assert said(engine, prompt, on_event=clear)[0] == expected


def test_a_label_that_is_not_utf_8(model_dir, home):
    """File names need not be."""
    engine = engine_on(model_dir, home)
    engine.prompts.label = os.fsdecode(b"caf\xe9.txt")
    expected, _ = said(engine_on(model_dir, None), ids(LENGTH))
    assert said(engine, ids(LENGTH))[0] == expected
    assert read_header(files(home)[0]).label == "caf?.txt"


# Headers and entries ----------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("how", ["layers", "small chunks"])
def test_headers_have_the_prefill_time_of_their_block(model_dir, home, how, monkeypatch):
    plain = Model._forward_layer
    monkeypatch.setattr(Model, "_forward_layer", lambda *args: (time.sleep(0.002), plain(*args))[1])
    settings = SmallPages("stream", 0, page_tokens=192) if how == "layers" else None
    times = []
    said(
        engine_of(16, model_dir, home, settings), ids(LENGTH), on_event=lambda event: times.append(time.perf_counter())
    )
    at_least = 0.002 * 2 * (LENGTH // 16)  # a sleep for each layer and chunk
    assert times[-1] - times[0] > at_least
    assert sum(read_header(path).prefill_s for path in files(home)) > 0.9 * at_least


@pytest.mark.long
def test_tokens_cached_in_memory_are_saved_with_the_same_prefill_time_per_token(model_dir, home):
    engine = engine_on(model_dir, home)
    said(engine, ids(LENGTH))
    prefill_s = sum(read_header(path).prefill_s for path in files(home))
    PromptFolder(home).clear()
    said(engine, ids(LENGTH))
    assert len(files(home)) == 7
    assert sum(read_header(path).prefill_s for path in files(home)) > prefill_s / 3


@pytest.mark.parametrize("created", ["-inf", "inf", "nan", "1e300", "soon"])
def test_blocks_with_an_invalid_header_are_not_listed(model_dir, home, created):
    said(engine_on(model_dir, home), ids(LENGTH))
    for path in files(home):
        with_header(path, created=created)
    assert entries(PromptFolder(home)) == []
    with pytest.raises(UnusableBlock):
        read_header(files(home)[0])


def test_a_cycle_of_parents_does_not_loop(model_dir, home):
    said(engine_on(model_dir, home), ids(300))
    first, second = files(home)
    with_header(first, parent=read_header(second).key)
    assert sum(len(entry.blocks) for entry in entries(PromptFolder(home))) in (0, 2)
    with_header(first, parent=read_header(first).key)
    (entry,) = entries(PromptFolder(home))
    assert len(entry.blocks) == 2


def test_the_total_size_counts_shared_blocks_once(model_dir, home):
    said(engine_on(model_dir, home), ids(400) + ids(500, 1))
    said(engine_on(model_dir, home), ids(400) + ids(500, 2))
    found = entries(PromptFolder(home))
    assert [len(entry.blocks) for entry in found] == [7, 7]
    there = sum(path.stat().st_size for path in files(home))
    text = entries_table(found, PromptFolder(home), time.time(), None).plain
    assert text.splitlines()[-1].startswith(f"{there / 2**20:.1f} MiB")


def test_many_questions_on_one_document_are_one_entry_and_listed_in_linear_time(home, monkeypatch):
    store, kv = PromptFolder(home), torch.zeros(1, 1, TOKENS, 2, 1)
    store.make("f" * 16)

    def put(index, key, parent):
        header = Header(key, parent, "", "m", "", 1.0, 1.0)
        write_block(store.block("f" * 16, index, key), header, [0] * TOKENS, kv)

    for index in range(60):
        put(index, name(f"a{index}"), name(f"a{index - 1}") if index else "")
    for number in range(40):
        put(60, name(f"q{number}"), name("a59"))
    steps, plain = [], entries.__globals__["_chain"]
    counted = lambda *args: ((steps.append(block), block)[1] for block in plain(*args))  # noqa: E731
    monkeypatch.setitem(entries.__globals__, "_chain", counted)
    (entry,) = entries(store)
    assert (entry.prompts, len(entry.blocks)) == (40, 100)
    assert len(steps) <= 60 + 2 * 40


# Exactness ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["cut", "slow"])
def test_with_torch_the_rest_of_the_prefill_begins_at_a_chunk_border(model_dir, home, starts, monkeypatch, damage):
    prompt = ids(LENGTH)
    said(engine_of(512, model_dir, home), prompt)
    if damage == "slow":
        observe = restoring.Race.observe
        monkeypatch.setattr(restoring.Race, "observe", lambda race, *_: observe(race, 0.15, 0.01))  # of any machine
        monkeypatch.setattr(restoring, "TRIAL", 0.1)
    else:
        path = files(home)[2]
        path.write_bytes(path.read_bytes()[:-9])
    fresh = engine_of(512, model_dir, home)
    starts.clear()
    if damage == "cut":
        with pytest.warns(Degraded):
            said(fresh, prompt)
    else:
        said(fresh, prompt)
    assert starts[0] == 0


@pytest.mark.daily("96-*-dtype0")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("before", [[], [333], [333, 512, 700], [1200, 600]])
@pytest.mark.parametrize("chunk", [96, 512])
def test_torch_restores_the_same_bits_whatever_was_prefilled_before(model_dir, home, dtype, before, chunk):
    """Prompts of one session with a common prefix, compared with a fresh run without a prompt cache."""
    prompt = ids(LENGTH)
    engine = engine_of(chunk, model_dir, home, dtype=dtype)
    engine.reserve(3000)
    for length in before:
        said(engine, ids(length) if length <= LENGTH else prompt + ids(length - LENGTH, 1))
    said(engine, prompt)
    both = [engine_of(512, model_dir, each, dtype=dtype) for each in (home, None)]
    for each in both:
        said(each, prompt)
    ours, theirs = (each.idle_session.full.cache.store.read(0, LENGTH) for each in both)
    assert all(map(torch.equal, ours, theirs))


def test_the_last_token_of_a_prompt_in_memory_does_not_count_as_cached(model_dir, home):
    for each in (None, home):
        engine, seen = engine_on(model_dir, each), []
        said(engine, ids(LENGTH))
        said(engine, ids(LENGTH), on_event=seen.append)
        done = [event.done for event in seen if isinstance(event, Prefilled)]
        assert done == sorted(done)
        assert done[0] == LENGTH - 1
