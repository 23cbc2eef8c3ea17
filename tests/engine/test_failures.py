"""After a request that has failed anywhere, the next one gives the tokens of a fresh engine."""

import random

import pytest

from offload import GenerationConfig, sequence
from offload.caches import full, in_flight, selected, streaming_llm
from offload.engine import Engine
from offload.errors import SettingsError
from offload.memory import block_store
from offload.memory.factory import TieredStoreFactory
from offload.session import runners as runners_module
from offload.session import session as session_module
from offload.speculation.levels import level
from offload.speculation.passes import runner
from offload.speculation.trees import verification
from tests.support.engine import GREEDY, fresh, run, tokens
from tests.support.interrupts import interrupted
from tests.support.models import ids
from tests.support.offloading import make_link, settings

MODULES = (
    session_module,
    runners_module,
    sequence,
    block_store,
    full,
    in_flight,
    selected,
    streaming_llm,
    level,
    runner,
    verification,
)
LINES = 3000  # of these modules, at least, in each of the requests


class Planted(Exception):
    """No error that the engine knows."""


def offloaded(engine):
    operations, device = engine.model.operations, engine.model.device
    stores = TieredStoreFactory(operations, device, settings("stream", page_tokens=512), make_link())
    made = Engine(engine.model, (), 128, engine.draft, stores=stores)
    made.reserve(900)
    return made


@pytest.mark.parametrize(("make", "more"), [(fresh, {}), (offloaded, {"tree": "6"})])
def test_an_exception_anywhere(endless_engine, make, more):
    engine, prompt, places = make(endless_engine), ids(200), random.Random(1)
    expected = tokens(run(fresh(endless_engine), prompt, 12))
    lines = set()
    for _ in range(5):
        run(engine, ids(150, 1), 4, "triforce", "model", **more)
        with interrupted(places.randrange(LINES), *MODULES, event="line", error=Planted) as hit:
            run(engine, prompt, 12, "triforce", "model", **more)
        assert hit and engine.idle_session is None
        lines.update(hit)
        method, draft = places.choice([("ar", "none"), ("triforce", "model"), ("retrieval", "none")])
        assert tokens(run(engine, prompt, 12, method, draft, **more)) == expected, hit
    assert len(lines) > 2


def test_a_wrong_request_keeps_the_caches(endless_engine):
    engine = fresh(endless_engine)
    run(engine, ids(50), 4)
    before = engine.idle_session
    with pytest.raises(SettingsError):
        list(engine.generate(ids(50), GREEDY, GenerationConfig(max_new_tokens=4), logprobs=-1))
    assert engine.idle_session is before
