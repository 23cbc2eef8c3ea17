"""`middle`: whichever chunks the middle level reads, the text is plain decoding's."""

import gc

import pytest

from offload import Speculated
from offload.engine import Engine
from offload.errors import SettingsError
from offload.settings.methods import MIDDLES
from tests.support.engine import run, tokens
from tests.support.models import ids


def fresh(engine):
    """Make another engine whose passes over a prompt are long enough to be observed."""
    return Engine(engine.model, (), 100, engine.draft)


@pytest.mark.daily("retrieval-*", "triforce-model-streaming", "auto-lookup-h2o")
@pytest.mark.parametrize("middle", [name for name, middle in MIDDLES.items() if middle.whole is None])
@pytest.mark.parametrize(("method", "draft"), [("retrieval", "none"), ("triforce", "model"), ("auto", "lookup")])
def test_greedy_is_plain_greedy(endless_engine, middle, method, draft):
    prompt = ids(400)
    expected = tokens(run(fresh(endless_engine), prompt, 50))
    events = run(fresh(endless_engine), prompt, 50, method, draft, middle=middle, gamma1=3, gamma2=5)
    assert tokens(events) == expected
    last = [event for event in events if isinstance(event, Speculated)][-1]
    assert method == "auto" or middle in {row.drafter for row in last.levels}


def test_one_session_serves_all_of_them_and_keeps_what_it_needs(endless_engine):
    engine, prompt = fresh(endless_engine), ids(400)
    expected = tokens(run(fresh(endless_engine), prompt, 20))
    full = None
    for middle in ("h2o", "retrieval", "h2o", "streaming"):
        other = [*prompt[:200], *ids(100, seed=4)]
        run(engine, other, 5, "retrieval", middle=middle)
        assert tokens(run(engine, prompt, 20, "retrieval", middle=middle)) == expected
        gc.collect()
        cache = engine.idle_session.full.cache
        assert len(cache.followers) == (middle == "h2o")
        assert full in (None, cache)
        full = cache


def test_an_unknown_one_is_refused(endless_engine):
    with pytest.raises(SettingsError, match="middle is 'h20'"):
        run(endless_engine, ids(5), 5, "retrieval", middle="h20")
