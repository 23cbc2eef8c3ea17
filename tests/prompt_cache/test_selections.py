"""Prompts read with `--approximate retrieval` on disk: restored with the bits of a fresh prefill on such a cache."""

import pytest

from offload.prompt_cache.fingerprint import TOKENS
from tests.support.models import ids
from tests.support.prompt_cache import CHUNK, LENGTH, engine_on, files, said, spoil

BLOCKS = LENGTH // TOKENS
RETRIEVAL = {"approximate": "retrieval", "window": 16}


def test_a_restored_prompt_goes_on_as_one_that_was_read(model_dir, home, native_operations):
    """Also one with the same beginning, another chunk of prefill, and a conversation that goes on."""
    prompt, other = ids(LENGTH), ids(500) + ids(400, 1)

    def answered(where, text, chunk=CHUNK):
        return said(engine_on(model_dir, where, operations=native_operations, chunk=chunk), text, **RETRIEVAL)

    expected, (wanted, _) = answered(None, prompt), answered(None, other)
    assert expected[0] != said(engine_on(model_dir, None, operations=native_operations), prompt)[0]
    for restored, chunk in ((0, CHUNK), (BLOCKS * TOKENS, CHUNK), (BLOCKS * TOKENS, 4 * CHUNK)):
        assert answered(home, prompt, chunk) == (expected[0], restored)
    engine = engine_on(model_dir, home, operations=native_operations, room=1200)
    assert said(engine, other, **RETRIEVAL) == (wanted, 500 // TOKENS * TOKENS)
    longer = [*other, *wanted, *ids(150, 2)]
    following, _ = said(engine_on(model_dir, None, operations=native_operations, room=1200), longer, **RETRIEVAL)
    assert said(engine, longer, **RETRIEVAL) == (following, 0)  # its beginning is in memory
    assert len(files(home)) == BLOCKS + (len(longer) // TOKENS - 500 // TOKENS)


def test_a_damaged_block_is_computed_again(model_dir, home, native_operations):
    prompt = ids(LENGTH)
    expected, _ = said(engine_on(model_dir, home, operations=native_operations), prompt, **RETRIEVAL)
    spoil(files(home)[3])
    with pytest.warns(match="a file of the prompt cache is not used"):
        found = said(engine_on(model_dir, home, operations=native_operations), prompt, **RETRIEVAL)
    assert found == (expected, (BLOCKS - 1) * TOKENS)
    assert said(engine_on(model_dir, home, operations=native_operations), prompt, **RETRIEVAL) == (
        expected,
        BLOCKS * TOKENS,
    )


@pytest.mark.parametrize(
    "changes", [{}, RETRIEVAL | {"budget": 80}, RETRIEVAL | {"sink": 32}, {"approximate": "h2o", "window": 16}], ids=str
)
def test_nothing_else_restores_them(model_dir, home, native_operations, changes):
    """Neither an exact run, nor other sizes, nor a cache that forgets, which saves nothing either."""
    prompt = ids(LENGTH)
    said(engine_on(model_dir, home, operations=native_operations), prompt, **RETRIEVAL)
    expected, _ = said(engine_on(model_dir, None, operations=native_operations), prompt, **changes)
    before = len(files(home))
    assert said(engine_on(model_dir, home, operations=native_operations), prompt, **changes) == (expected, 0)
    assert len(files(home)) == before + (0 if changes.get("approximate") == "h2o" else BLOCKS)
