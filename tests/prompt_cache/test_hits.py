"""What counts as a hit on an entry of the prompt cache."""

import pytest

from offload.errors import Degraded
from offload.events import Restored
from offload.prompt_cache.entries import entries
from offload.prompt_cache.folder import PromptFolder
from tests.support.models import ids
from tests.support.prompt_cache import LENGTH, engine_on, files, said, spoil


def hits(home):
    return [entry.hits for entry in entries(PromptFolder(home))]


def test_a_session_that_takes_over_a_document_is_one_hit_whatever_is_asked(model_dir, home, native_operations):
    """The questions' own words fill blocks, which are found on disk too."""
    prompts = [ids(LENGTH) + ids(300, seed) for seed in (1, 2, 3)]
    for session in range(4):
        engine = engine_on(model_dir, home, operations=native_operations, room=2000)
        for prompt in prompts:
            said(engine, prompt)
        assert hits(home) == [session]
    for prompt in prompts:  # each in a session of its own
        said(engine_on(model_dir, home, operations=native_operations), prompt)
    assert hits(home) == [3 + 3]


def test_a_common_beginning_in_memory_leaves_the_document_a_hit(model_dir, home, native_operations):
    prompts = [ids(200) + ids(600, seed) for seed in (1, 2)]
    for session in range(3):
        engine = engine_on(model_dir, home, operations=native_operations, room=2000)
        for prompt in prompts:
            said(engine, prompt)
        assert hits(home) == [session, session]


def test_what_has_to_be_run_after_all_is_no_hit(model_dir, home):
    """With torch and chunks of 512, blocks serve by fours."""
    said(engine_on(model_dir, home, chunk=512), ids(LENGTH))
    spoil(files(home)[2])
    events = []
    with pytest.warns(Degraded, match="not used"):
        said(engine_on(model_dir, home, chunk=512), ids(LENGTH), on_event=events.append)
    assert not [event for event in events if isinstance(event, Restored)]
    assert hits(home) == [0]
