"""`serve --tensor-parallel`: rank 0 serves and the others follow; here as threads."""

import json
import queue
import signal
import threading
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest

from offload import GenerationConfig, Sampling
from offload.errors import RankLost, SettingsError
from offload.events import Finished, Tokens
from offload.loading.tokenizers.tool_calls import FORMATS
from offload.settings.config import Speculation
from offload.settings.constraint import Constraint
from tests.support.waiting import until
from triforce_cli.commands import serve as serve_command
from triforce_cli.serve.engine_thread import EngineThread
from triforce_cli.serve.errors import ApiError
from triforce_cli.serve.ranks import follow, unpacked
from triforce_cli.serve.sequences import SequenceSettings, ServedSequence


class Rank:
    """One of two ranks, as threads, which send each other JSON over queues."""

    size, lost = 2, False

    def __init__(self, rank, down, up):
        self.rank, self._down, self._up, self.received = rank, down, up, []

    def lose(self):
        self.lost = True

    def broadcast(self, value):
        if self.lost:
            raise RankLost("another rank has ended", "see what it said")
        if self.rank == 0:
            self._down.put(json.dumps(value))
            return value
        self.received.append(json.loads(self._down.get(timeout=60)))
        return self.received[-1]

    def agree(self, numbers):
        return self.broadcast(numbers)

    def collect(self, value):
        return [value, self._up.get(timeout=60)] if self.rank == 0 else self._up.put(value)

    @property
    def sequences(self):
        """The settings of the sequences that rank 0 has sent."""
        return [unpacked(value) for value in self.received if isinstance(value, dict)]


def settings(prompt=(1, 2, 3), new=8, **changes):
    """Return a sequence that takes as many passes on both: these engines are in no group, and do not agree on times."""
    config = GenerationConfig(max_new_tokens=new, seed=3, stop=("never this",))
    drafting = Speculation("lookup", gamma2=3)
    return replace(SequenceSettings(list(prompt), Sampling(temperature=1.0), config, drafting), **changes)


@pytest.fixture
def started(opened, loaded, monkeypatch):
    """Start an engine with a follower on an engine of its own; return it, both ranks, and what is set at the end."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # only the main thread may
    queues = queue.Queue(), queue.Queue()
    first, second = Rank(0, *queues), Rank(1, *queues)
    other, tokenizer, ended = opened.model.load(), opened.model.checkpoint.load_tokenizer(), threading.Event()

    def run():
        with suppress(RankLost, queue.Empty):
            follow(other, second, tokenizer)
            ended.set()

    engine = EngineThread(loaded, 1, 8, group=first)
    threading.Thread(target=run, daemon=True).start()
    engine.start()
    yield SimpleNamespace(engine=engine, first=first, second=second, ended=ended, tokenizer=tokenizer)
    engine.stop(60)


def asked(started, wanted):
    """Submit a sequence; return it, its events as they come, and what is set after the last one."""
    events, done = [], threading.Event()

    def post(event):
        events.append(event)
        if isinstance(event, Finished | Exception):
            done.set()

    sequence = ServedSequence(wanted, started.tokenizer, post)
    started.engine.submit([sequence])
    return sequence, events, done


def test_all_ranks_generate_what_rank_0_is_asked_for_and_end_with_it(started, loaded):
    wanted = [settings(), settings((4, 5), logprobs=2), settings(calls=FORMATS[2], is_chat=True)]
    wanted.insert(1, settings(sampling=Sampling(constraint=Constraint("regex", "[a-z]+"))))  # this model has no end
    for sequence, events, done in [asked(started, each) for each in wanted]:
        assert done.wait(60)
        if sequence.settings.sampling.constraint is not None:
            assert "end-of-sequence" in events[-1].message
            continue
        own = sequence.settings
        alone = loaded.generate(own.ids, own.sampling, own.config, own.speculation)
        assert sequence.meter.new_tokens == sum(len(event.ids) for event in alone if isinstance(event, Tokens))
    assert started.engine.stop(60) and started.ended.wait(60) and started.engine.error is None
    assert started.second.sequences == wanted


def test_a_cancelled_sequence_ends_on_all_ranks(started):
    sequence, _, done = asked(started, settings(new=1900))
    until(lambda: sequence.meter.new_tokens >= 3)
    started.engine.cancel([sequence])
    _, _, next_done = asked(started, settings(new=2))
    assert next_done.wait(60) and not done.is_set()
    assert started.engine.stop(60) and started.ended.wait(60)
    assert sequence.meter.new_tokens < 1900 and len(started.second.sequences) == 2


def test_an_idle_server_begins_another_batch_on_all_ranks(started, monkeypatch):
    monkeypatch.setattr("triforce_cli.serve.engine_thread.IDLE_S", 0.0)
    asked(started, settings(new=2))[2].wait(60)  # from here on, no wait is longer
    until(lambda: started.second.received.count(None) >= 2)
    _, events, done = asked(started, settings(new=2))
    assert done.wait(60) and isinstance(events[-1], Finished)
    assert started.engine.stop(60) and started.ended.wait(60)


def test_a_lost_rank_ends_requests_and_the_thread_with_its_error(started):
    engine, gave_up = started.engine, threading.Event()
    engine.gave_up = gave_up.set
    _, events, done = asked(started, settings(new=1900))
    until(lambda: events)
    started.first.lose()
    assert done.wait(60) and events[-1].status in (500, 503)
    assert gave_up.wait(60) and isinstance(engine.error, RankLost)
    with pytest.raises(ApiError):
        engine.check(1)


def test_the_other_ranks_need_no_keys(triforce_here, monkeypatch):
    def start(*more, **options):
        raise SettingsError("it came to its ranks", "")

    monkeypatch.setattr(serve_command, "start_or_join_ranks", start)
    args = ("serve", "--host", "0.0.0.0", "--api-key-file", "/nothing/here")
    environment = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "first", "MASTER_PORT": "29500"}
    for rank, found in (("1", "it came to its ranks"), ("0", "No such file")):
        for name, value in (environment | {"RANK": rank}).items():
            monkeypatch.setenv(name, value)
        result = triforce_here(*args)
        assert result.returncode == 2 and found in result.stderr
