"""What counts as a hit on an entry of the prompt cache."""

import pytest

from offload import GenerationConfig, Sampling
from offload.batching.request import BatchRequest
from offload.errors import Degraded
from offload.events import Restored
from offload.prompt_cache.entries import entries
from offload.prompt_cache.folder import PromptFolder
from tests.support.models import ids
from tests.support.prompt_cache import LENGTH, engine_on, files, said, spoil


def hits(home):
    return [entry.hits for entry in entries(PromptFolder(home))]


def test_a_session_that_restores_a_document_is_one_hit_for_any_number_of_questions(model_dir, home, native_operations):
    """The questions fill blocks of their own, which are restored too."""
    prompts = [ids(LENGTH) + ids(300, seed) for seed in (1, 2, 3)]
    for session in range(4):
        engine = engine_on(model_dir, home, operations=native_operations, room=2000)
        for prompt in prompts:
            said(engine, prompt)
        assert hits(home) == [session]
    for prompt in prompts:  # each in a session of its own
        said(engine_on(model_dir, home, operations=native_operations), prompt)
    assert hits(home) == [3 + 3]


def test_a_shared_prefix_in_memory_still_counts_the_document_as_a_hit(model_dir, home, native_operations):
    prompts = [ids(200) + ids(600, seed) for seed in (1, 2)]
    for session in range(3):
        engine = engine_on(model_dir, home, operations=native_operations, room=2000)
        for prompt in prompts:
            said(engine, prompt)
        assert hits(home) == [session, session]


def test_a_restore_that_ends_in_running_the_whole_prompt_is_no_hit(model_dir, home):
    """With torch and chunks of 512, blocks are restored in groups of four."""
    said(engine_on(model_dir, home, chunk=512), ids(LENGTH))
    spoil(files(home)[2])
    events = []
    with pytest.warns(Degraded, match="not used"):
        said(engine_on(model_dir, home, chunk=512), ids(LENGTH), on_event=events.append)
    assert not [event for event in events if isinstance(event, Restored)]
    assert hits(home) == [0]


def test_scopes_share_no_blocks(model_dir, home, native_operations):
    def restored(scope):
        engine = engine_on(model_dir, home, operations=native_operations)
        wanted = BatchRequest(0, ids(LENGTH), Sampling(temperature=0), GenerationConfig(max_new_tokens=2), scope=scope)
        return sum(each.tokens for _, each in engine.generate_batch([wanted], 1) if isinstance(each, Restored))

    assert [restored(scope) for scope in ("one", "other", "one", "")] == [0, 0, 896, 0]
