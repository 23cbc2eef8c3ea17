"""Prompt caches among other processes, odd files and long sessions: never an end of the run, never another bit."""

import hashlib
import os
import time

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from offload.decoder import Model
from offload.errors import Degraded
from offload.events import Prefilled
from offload.offloading import TierSettings
from offload.prompt_cache import restore as restoring
from offload.prompt_cache.block import write_block
from offload.prompt_cache.entries import entries
from offload.prompt_cache.fingerprint import TOKENS
from offload.prompt_cache.folder import PromptFolder
from offload.prompt_cache.header import Header, UnusableBlock, read_header
from tests.support.models import ids, make_hf_model
from tests.support.prompt_cache import LENGTH, engine_on, files, said
from triforce_cli.output.prompt_cache import table


@pytest.fixture
def starts(monkeypatch):
    """Where each pass over the model begins."""
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


# Others ------------------------------------------------------------------------------------------------------------


def test_a_new_model_s_prompt_is_saved_where_others_fill_the_limit(model_dir, home, tmp_path, recwarn):
    (other := tmp_path / "other").mkdir()
    make_hf_model("llama", head_dim=32, seed=1).save_pretrained(other)
    said(engine_on(other, home), ids(LENGTH))
    limit = sum(path.stat().st_size for path in files(home)) + 1000
    for path in files(home):
        os.utime(path, (1000, 1000))
    said(engine_on(model_dir, home, limit=limit), ids(LENGTH))
    assert not [str(each.message) for each in recwarn.list]
    assert len([path for path in files(home) if path.stat().st_mtime > 1000]) == 7


def test_what_could_never_be_kept_removes_nobody_else_s(model_dir, home):
    said(engine_on(model_dir, home), ids(LENGTH))
    for path in files(home):
        os.utime(path, (1000, 1000))
    limit = sum(path.stat().st_size for path in files(home)) + 1000
    with pytest.warns(Degraded, match="limit"):
        said(engine_on(model_dir, home, limit=limit), ids(3 * LENGTH, 1))
    assert len(files(home)) >= 7  # what had been saved before that was known stays as well


def test_clearing_while_a_prompt_is_saved_does_not_end_its_run(model_dir, home):
    prompt, engine = ids(LENGTH), engine_on(model_dir, home)
    expected, _ = said(engine_on(model_dir, None), prompt)

    def clear(event):
        time.sleep(0.02)  # so that what was begun is written
        PromptFolder(home).clear()

    assert said(engine, prompt, on_event=clear)[0] == expected


def test_a_label_that_is_no_text(model_dir, home):
    """A file's name need not be."""
    engine = engine_on(model_dir, home)
    engine.prompts.label = os.fsdecode(b"caf\xe9.txt")
    expected, _ = said(engine_on(model_dir, None), ids(LENGTH))
    assert said(engine, ids(LENGTH))[0] == expected
    assert read_header(files(home)[0]).label == "caf?.txt"


# What is known of a block ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["layers", "small chunks"])
def test_blocks_know_how_long_computing_them_took(model_dir, home, how, monkeypatch):
    plain = Model._forward_layer
    monkeypatch.setattr(Model, "_forward_layer", lambda *args: (time.sleep(0.002), plain(*args))[1])
    settings = TierSettings("stream", 0, page_tokens=192) if how == "layers" else None
    times = []
    said(
        engine_of(16, model_dir, home, settings), ids(LENGTH), on_event=lambda event: times.append(time.perf_counter())
    )
    at_least = 0.002 * 2 * (LENGTH // 16)  # a sleep for each layer and chunk
    assert times[-1] - times[0] > at_least
    assert sum(read_header(path).prefill_s for path in files(home)) > 0.9 * at_least


def test_what_was_held_is_saved_as_if_it_had_been_run(model_dir, home):
    engine = engine_on(model_dir, home)
    said(engine, ids(LENGTH))
    paid = sum(read_header(path).prefill_s for path in files(home))
    PromptFolder(home).clear()
    said(engine, ids(LENGTH))
    assert len(files(home)) == 7
    assert sum(read_header(path).prefill_s for path in files(home)) > paid / 3


@pytest.mark.parametrize("created", ["-inf", "inf", "nan", "1e300", "soon"])
def test_a_header_s_nonsense_is_left_out(model_dir, home, created):
    said(engine_on(model_dir, home), ids(LENGTH))
    for path in files(home):
        with_header(path, created=created)
    assert entries(PromptFolder(home)) == []
    with pytest.raises(UnusableBlock):
        read_header(files(home)[0])


def test_blocks_that_claim_to_follow_themselves_have_an_end(model_dir, home):
    said(engine_on(model_dir, home), ids(300))
    first, second = files(home)
    with_header(first, parent=read_header(second).key)
    assert sum(len(entry.blocks) for entry in entries(PromptFolder(home))) in (0, 2)
    with_header(first, parent=read_header(first).key)
    (entry,) = entries(PromptFolder(home))
    assert len(entry.blocks) == 2


def test_the_total_counts_what_is_shared_once(model_dir, home):
    said(engine_on(model_dir, home), ids(400) + ids(500, 1))
    said(engine_on(model_dir, home), ids(400) + ids(500, 2))
    found = entries(PromptFolder(home))
    assert [len(entry.blocks) for entry in found] == [7, 7]
    there = sum(path.stat().st_size for path in files(home))
    assert table(found, PromptFolder(home), time.time()).splitlines()[-1].startswith(f"{there / 2**20:.1f} MiB")


def test_many_questions_on_one_document_are_one_entry_and_found_in_one_walk(home, monkeypatch):
    store, keys, values = PromptFolder(home), *torch.zeros(2, 1, 1, TOKENS, 1).unbind()
    store.make("f" * 16)

    def put(index, key, parent):
        header = Header(key, parent, "", "m", "", 1.0, 1.0)
        write_block(store.block("f" * 16, index, key), header, [0] * TOKENS, keys.clone(), values.clone())

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
def test_with_torch_the_rest_begins_where_a_chunk_does(model_dir, home, starts, monkeypatch, damage):
    prompt = ids(LENGTH)
    said(engine_of(512, model_dir, home), prompt)
    if damage == "slow":
        read = restoring.Prompt.read
        monkeypatch.setattr(restoring.Prompt, "read", lambda *args: (time.sleep(0.15), read(*args))[1])
        monkeypatch.setattr(restoring, "TRIAL", 0.25)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("before", [[], [333], [333, 512, 700], [1200, 600]])
@pytest.mark.parametrize("chunk", [96, 512])
def test_torch_restores_every_bit_whatever_came_before(model_dir, home, dtype, before, chunk):
    """Prompts of a session that begin alike, and what is then saved, against a fresh run without a memory."""
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


def test_the_last_token_of_a_prompt_that_is_held_does_not_count_as_cached(model_dir, home):
    for each in (None, home):
        engine, seen = engine_on(model_dir, each), []
        said(engine, ids(LENGTH))
        said(engine, ids(LENGTH), on_event=seen.append)
        done = [event.done for event in seen if isinstance(event, Prefilled)]
        assert done == sorted(done)
        assert done[0] == LENGTH - 1
