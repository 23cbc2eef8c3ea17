"""Prompts of quantised keys and values on disk: smaller, and restored with the bits of a fresh prefill."""

import pytest
import torch

from offload.architecture.kv_formats import WINDOW
from offload.kernels.native.ops import NativeOperations
from offload.prompt_cache.fingerprint import TOKENS
from tests.support.models import ids
from tests.support.offloading import native_kernel
from tests.support.prompt_cache import LENGTH, engine_on, files, said, spoil

BLOCKS = LENGTH // TOKENS


@pytest.fixture
def engine(model_dir):
    """`engine(home, kv)` on the native kernel."""
    if native_kernel() is None:
        pytest.skip("there is no native kernel here")

    def make(home, kv, dtype=torch.bfloat16):
        return engine_on(model_dir, home, operations=NativeOperations(native_kernel()), dtype=dtype, kv=kv)

    return make


def test_blocks_are_whole_windows():
    assert TOKENS % WINDOW == 0


@pytest.mark.parametrize("kind", ["q8"])
def test_a_restored_prompt_goes_on_as_one_that_was_read(engine, home, kind):
    """Also by methods that draft on a selection, and with a beginning that two prompts share."""
    prompt, other = ids(LENGTH), ids(500) + ids(400, 1)
    expected, (wanted, _) = said(engine(None, kind), prompt), said(engine(None, kind), other)
    for restored, method in ((0, "ar"), (BLOCKS * TOKENS, "ar"), (BLOCKS * TOKENS, "retrieval")):
        assert said(engine(home, kind), prompt, method) == (expected[0], restored)
    resumed = engine(home, kind)
    assert said(resumed, other) == (wanted, 500 // TOKENS * TOKENS)
    assert said(resumed, prompt)[0] == expected[0]


def test_fp32_keeps_its_sink_in_fp32(engine, home):
    prompt = ids(LENGTH)
    expected, _ = said(engine(None, "q8", torch.float32), prompt)
    answers = [said(engine(home, "q8", torch.float32), prompt) for _ in range(2)]
    assert answers == [(expected, 0), (expected, BLOCKS * TOKENS)]


def test_no_format_restores_the_blocks_of_another(engine, tmp_path):
    """All in one folder, where the files of a format are as much smaller as its keys and values."""
    prompt, home, sizes, seen = ids(LENGTH), tmp_path / "prompts", {}, set()
    for kind in ("bf16", "q8"):
        expected, _ = said(engine(None, kind), prompt)
        assert said(engine(home, kind), prompt) == (expected, 0)
        assert said(engine(home, kind), prompt) == (expected, BLOCKS * TOKENS)
        new = set(files(home)) - seen
        sizes[kind], seen = max(path.stat().st_size for path in new if "000000" not in path.name), seen | new
    assert len(seen) == 2 * BLOCKS
    assert sizes["q8"] < sizes["bf16"]


def test_a_damaged_block_is_computed_again(engine, home):
    prompt = ids(LENGTH)
    expected, _ = said(engine(home, "q8"), prompt)
    for number in (0, 3):
        spoil(files(home)[number])
    with pytest.warns(match="2 files of the prompt cache are not used"):
        assert said(engine(home, "q8"), prompt) == (expected, (BLOCKS - 2) * TOKENS)
    assert said(engine(home, "q8"), prompt) == (expected, BLOCKS * TOKENS)
