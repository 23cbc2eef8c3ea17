"""Whole generations whose passes have fixed shapes, as on a GPU; here they are repeated without a recording."""

from dataclasses import replace

import pytest

from offload import GenerationConfig, Speculation, Tokens
from offload.caches import chunk_table, factory
from offload.caches.chunk_table import ChunkTableCache
from offload.caches.retrieval import CopiedCache
from offload.speculation.passes import runner
from offload.speculation.passes.cuda_graphs import StepGraphs
from tests.support.engine import GREEDY, SMALL, fresh, run, tokens
from tests.support.models import ids
from tests.support.retrieval import attend_table_by_torch


@pytest.fixture(scope="module")
def engine(opened_with_draft):
    """Make an engine on torch's operations that no token ends."""
    opened = replace(opened_with_draft, config=replace(opened_with_draft.config, kernel="off"))
    return opened.load().without_end()


@pytest.fixture(params=[CopiedCache, ChunkTableCache], ids=["copied", "in place"])
def recorded(request, monkeypatch):
    """Give every cache the steps that a GPU would record; return how many rows each of them has."""
    rows = []

    def record(run):
        rows.append(len(run()))
        return run

    monkeypatch.setattr(runner, "graphs_for", lambda model, cache: StepGraphs(model, cache, record))
    monkeypatch.setattr(factory, "_selected_class", lambda *_: request.param)
    monkeypatch.setattr(chunk_table, "attend_table", attend_table_by_torch)
    return rows


@pytest.mark.daily("copied-triforce-model", "in place-retrieval-none")
@pytest.mark.parametrize(("method", "draft"), [("triforce", "model"), ("retrieval", "none")])
def test_greedy_is_plain_greedy(engine, recorded, method, draft, monkeypatch):
    prompt = ids(100)
    with monkeypatch.context() as plainly:
        plainly.setattr(runner, "graphs_for", lambda model, cache: None)
        expected = tokens(run(fresh(engine), prompt, 40))
    assert not recorded
    found = tokens(run(fresh(engine), prompt, 40, method, draft, gamma1=3, gamma2=7))
    assert found == expected
    assert len(recorded) >= 3


@pytest.mark.daily("copied-retrieval-none", "in place-triforce-a model", "*-auto-*")
@pytest.mark.parametrize(("method", "draft"), [("triforce", "a model"), ("retrieval", "none"), ("auto", "a model")])
def test_nothing_is_recorded_after_the_first_token(engine, recorded, method, draft):
    wanted = Speculation(method, draft, **SMALL, gamma1=3, gamma2=7)
    other = fresh(engine)
    for prompt in (ids(100), ids(100, 1)):
        counts = [
            len(recorded)
            for event in other.generate(prompt, GREEDY, GenerationConfig(max_new_tokens=24), wanted)
            if isinstance(event, Tokens)
        ]
        assert len(counts) > 2
        assert counts[0] == counts[-1] > 4
