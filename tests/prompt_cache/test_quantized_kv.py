"""Prompts of quantised keys and values on disk: smaller, and restored with the bits of a fresh prefill."""

import pytest
import torch

from offload.prompt_cache.fingerprint import TOKENS
from tests.support.models import ids
from tests.support.prompt_cache import LENGTH, engine_on, files, said

BLOCKS = LENGTH // TOKENS


@pytest.fixture
def engine(model_dir, native_operations):
    """`engine(home, kv)` on the native kernel."""
    return lambda home, kv="q8", dtype=torch.bfloat16: engine_on(
        model_dir, home, operations=native_operations, dtype=dtype, kv=kv
    )


def test_a_restored_prompt_goes_on_as_one_that_was_read(engine, home):
    """Also by methods that draft on a selection, and with a beginning that two prompts share."""
    prompt, other = ids(LENGTH), ids(500) + ids(400, 1)
    expected, (wanted, _) = said(engine(None), prompt), said(engine(None), other)
    for restored, method in ((0, "ar"), (BLOCKS * TOKENS, "ar"), (BLOCKS * TOKENS, "retrieval")):
        assert said(engine(home), prompt, method) == (expected[0], restored)
    resumed = engine(home)
    assert said(resumed, other) == (wanted, 500 // TOKENS * TOKENS)
    assert said(resumed, prompt)[0] == expected[0]


def test_no_format_restores_the_blocks_of_another(engine, home):
    sizes, seen = {}, set()
    for kind in ("bf16", "q8"):
        assert said(engine(home, kind), ids(LENGTH))[1] == 0
        assert said(engine(home, kind), ids(LENGTH))[1] == BLOCKS * TOKENS
        new = set(files(home)) - seen
        sizes[kind], seen = max(path.stat().st_size for path in new if "000000" not in path.name), seen | new
    assert len(seen) == 2 * BLOCKS and sizes["q8"] < sizes["bf16"]
