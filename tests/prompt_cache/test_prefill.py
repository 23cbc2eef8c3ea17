"""Prefill with a prompt cache has the same output as without, on every kernel, placement and method."""

import pytest
import torch

from offload.errors import Degraded
from offload.events import Prefilled
from offload.kernels.native.ops import NativeOperations
from offload.kernels.native.structs import PIECE
from offload.memory.tier_settings import TierSettings
from offload.prompt_cache.fingerprint import TOKENS
from tests.support.models import FAMILY_CASES, ids, make_hf_model
from tests.support.offloading import SmallPages, native_kernel
from tests.support.prompt_cache import CHUNK, LENGTH, engine_on, files, said, spoil

METHODS = ["ar", "retrieval", "triforce"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_restored_blocks_do_not_change_the_output(model_dir, home, operations, dtype):
    prompt = ids(LENGTH)
    expected, _ = said(engine_on(model_dir, None, operations=operations, dtype=dtype), prompt)
    for restored in (0, 7 * TOKENS):
        engine = engine_on(model_dir, home, operations=operations, dtype=dtype)
        assert said(engine, prompt) == (expected, restored)
    assert len(files(home)) == 7


@pytest.mark.daily("native-*")
@pytest.mark.parametrize("name", ["olmo3", "gemma4"])  # the second with other heads there
def test_windows_are_restored_with_the_layers_beside_them(tmp_path, home, operations, name):
    family, changes = FAMILY_CASES[name]
    make_hf_model(family, **changes | {"sliding_window": 100}).save_pretrained(tmp_path / "model")

    def engine(home):
        return engine_on(tmp_path / "model", home, operations=operations)

    first, second = ids(LENGTH), ids(600) + ids(300, 1)
    answers = [said(engine(None), each)[0] for each in (first, second)]
    assert said(engine(home), first) == (answers[0], 0)
    assert said(engine(home), second) == (answers[1], 4 * TOKENS)
    both = engine(home)
    assert said(both, first) == (answers[0], 7 * TOKENS)
    assert said(both, second)[0] == answers[1]
    spoil(files(home)[2])
    with pytest.warns(Degraded):
        assert said(engine(home), first)[0] == answers[0]


@pytest.fixture(scope="module")
def saved(model_dir, tmp_path_factory):
    """The folder in which the blocks of a prompt are, and the tokens after it."""
    folder = tmp_path_factory.mktemp("saved") / "prompts"
    return folder, said(engine_on(model_dir, folder), ids(LENGTH))[0]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_continues_after_a_restore(model_dir, saved, method):
    folder, expected = saved
    assert said(engine_on(model_dir, folder), ids(LENGTH), method) == (expected, 7 * TOKENS)


@pytest.mark.parametrize(("mode", "resident"), [("stream", 0), ("hybrid", 1), ("host", 0)])
def test_tiered_stores_save_and_restore(model_dir, home, operations, mode, resident):
    """Pages of 192 tokens: their borders are not those of blocks."""
    if mode != "stream" and operations.kernel is None:
        pytest.skip("only the native kernel attends on the host")
    settings = SmallPages(mode, resident, page_tokens=192)
    first, second = ids(LENGTH), ids(500) + ids(400, 1)
    answers = [said(engine_on(model_dir, None, operations=operations), each)[0] for each in (first, second)]
    assert said(engine_on(model_dir, home, settings, operations), first) == (answers[0], 0)
    engine = engine_on(model_dir, home, settings, operations)
    assert said(engine, second) == (answers[1], 3 * TOKENS)
    assert said(engine, first) == (answers[0], 7 * TOKENS - 500)  # the others were in memory
    assert (
        said(engine_on(model_dir, home, operations=operations), second)[1] == 0
    )  # one contiguous cache rounds differently from pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_tiered_store_restores_blocks_of_a_plain_one_and_the_reverse(model_dir, tmp_path, dtype):
    """With the native kernel and pages of whole PIECEs the bits are the same."""
    if native_kernel() is None:
        pytest.skip("there is no native kernel here")
    prompt, tiers = ids(LENGTH), TierSettings("hybrid", 1, page_tokens=PIECE)

    def engine(home, settings):
        return engine_on(model_dir, home, settings, NativeOperations(native_kernel()), dtype=dtype)

    expected, _ = said(engine(None, None), prompt)
    for number, order in enumerate(((tiers, None), (None, tiers))):
        home = tmp_path / str(number)
        assert [said(engine(home, each), prompt) for each in order] == [(expected, 0), (expected, 7 * TOKENS)]


def test_any_shared_prefix_is_restored(model_dir, home):
    document = ids(700)
    said(engine_on(model_dir, home), document + ids(100, 1))
    expected, _ = said(engine_on(model_dir, None), document + ids(200, 2))
    assert said(engine_on(model_dir, home), document + ids(200, 2)) == (expected, 5 * TOKENS)
    assert len(files(home)) == 6 + 2  # the five shared blocks are stored once
    assert said(engine_on(model_dir, home), document[:300])[1] == 2 * TOKENS
    assert said(engine_on(model_dir, home), [5, *document])[1] == 0


def test_a_prompt_of_whole_blocks_still_runs_its_last_token(model_dir, home):
    prompt = ids(4 * TOKENS)
    expected, _ = said(engine_on(model_dir, None), prompt)
    said(engine_on(model_dir, home), prompt)
    assert said(engine_on(model_dir, home), prompt) == (expected, 3 * TOKENS)


def test_with_torch_the_rest_is_run_in_the_same_chunks_as_without_a_cache(model_dir, home):
    """Other chunks would round differently."""
    prompt = ids(LENGTH)
    for chunk, restored in ((CHUNK, 7 * TOKENS), (3 * TOKENS, 6 * TOKENS), (1024, 0), (100, 0)):
        runs = []
        for _ in range(2):
            engine = engine_on(model_dir, home, chunk=chunk)
            runs.append([])
            said(engine, prompt, on_event=runs[-1].append)
        borders = [[event.done for event in run if isinstance(event, Prefilled)] for run in runs]
        assert borders[0][1] == 0  # no blocks of another chunk size are restored
        after = borders[1][borders[1].index(restored) :]
        assert [done for done in borders[0] if done > restored] == [done for done in after if done > restored]


@pytest.mark.parametrize(("before", "chunk"), [([333, 512, 700], 96), ([1200, 600], 512)])
def test_torch_restores_the_same_bits_whatever_was_prefilled_before(model_dir, home, before, chunk):
    """Prompts of one session with a common prefix, compared with a fresh run without a prompt cache."""
    prompt = ids(LENGTH)
    engine = engine_on(model_dir, home, dtype=torch.bfloat16, chunk=chunk)
    engine.reserve(3000)
    for length in before:
        said(engine, ids(length) if length <= LENGTH else prompt + ids(length - LENGTH, 1))
    said(engine, prompt)
    both = [engine_on(model_dir, each, dtype=torch.bfloat16, chunk=512) for each in (home, None)]
    for each in both:
        said(each, prompt)
    ours, theirs = (each.idle_session.full.cache.store.read(0, LENGTH) for each in both)
    assert all(map(torch.equal, ours, theirs))
