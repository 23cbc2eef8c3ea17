"""`serve --tensor-parallel`: rank 0 serves and the others follow; here as threads."""

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
from triforce_cli.serve.ranks import follow
from triforce_cli.serve.sequences import SequenceSettings, ServedSequence


class Pair:
    """Both ends of a group of two threads, over queues, with values that have been JSON."""

    def __init__(self):
        self._down, self._up, self.sent, self.lost = queue.Queue(), queue.Queue(), [], False

    def lose(self):
        self.lost = True
        self._down.put("for the one that waits")

    def end(self, rank):
        pair = self

        class End:
            size = 2

            def __init__(self):
                self.rank = rank

            def broadcast(self, value):
                self.check()
                if rank == 0:
                    pair.sent.append(value)
                    pair._down.put(value)
                    return value
                value = pair._down.get(timeout=60)
                self.check()
                return value

            def check(self):
                if pair.lost:
                    raise RankLost("another rank has ended", "see what it said")

            def agree(self, numbers):
                return self.broadcast(numbers)

            def collect(self, value):
                if rank == 0:
                    return [value, pair._up.get(timeout=60)]
                pair._up.put(value)
                return [value, value]

        return End()


def settings(prompt=(1, 2, 3), new=8, **changes):
    """Return a sequence that takes as many passes on both: these engines are in no group, and do not agree on times."""
    config = GenerationConfig(max_new_tokens=new, seed=3, stop=("never this",))
    drafting = Speculation("lookup", gamma2=3)
    return replace(SequenceSettings(list(prompt), Sampling(temperature=1.0), config, drafting), **changes)


@pytest.fixture
def started(opened, loaded, monkeypatch):
    """Start an engine with a follower on an engine of its own; return both, the follower's sequences, and the pair."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # only the main thread may
    followed, other, pair = [], opened.model.load(), Pair()
    tokenizer = opened.model.checkpoint.load_tokenizer()
    plain = ServedSequence.__init__

    def noted(self, *more):
        plain(self, *more)
        if threading.current_thread().name == "follower":
            followed.append(self.settings)

    monkeypatch.setattr(ServedSequence, "__init__", noted)
    ended = threading.Event()

    def run():
        with suppress(RankLost):
            follow(other, pair.end(1), tokenizer)
            ended.set()

    engine = EngineThread(loaded, 1, 8, group=pair.end(0))
    follower = threading.Thread(target=run, name="follower", daemon=True)
    follower.start()
    engine.start()
    yield SimpleNamespace(engine=engine, followed=followed, pair=pair, ended=ended, tokenizer=tokenizer)
    engine.stop(60)
    follower.join(60)


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
    engine = started.engine
    wanted = [settings(), settings((4, 5), logprobs=2), settings(calls=FORMATS[2], is_chat=True)]
    wanted.insert(1, settings(sampling=Sampling(constraint=Constraint("regex", "[a-z]+"))))  # this model has no end
    asked_for = [asked(started, each) for each in wanted]
    for sequence, events, done in asked_for:
        assert done.wait(60)
        if sequence.settings.sampling.constraint is not None:
            assert "end-of-sequence" in events[-1].message
            continue
        own = sequence.settings
        alone = loaded.generate(own.ids, own.sampling, own.config, own.speculation)
        assert sequence.meter.new_tokens == sum(len(each.ids) for each in alone if isinstance(each, Tokens))
    assert engine.stop(60) and started.ended.wait(60) and engine.error is None
    assert started.followed == wanted


def test_a_cancelled_sequence_ends_on_all_ranks(started):
    engine = started.engine
    sequence, _, done = asked(started, settings(new=1900))
    until(lambda: sequence.meter.new_tokens >= 3)
    engine.cancel([sequence])
    _, _, next_done = asked(started, settings(new=2))
    assert next_done.wait(60) and not done.is_set()
    until(lambda: len(started.followed) >= 2)  # the follower may still be behind
    assert sequence.meter.new_tokens < 1900 and len(started.followed) == 2


def test_a_lost_rank_ends_requests_and_the_thread_with_its_error(started):
    engine = started.engine
    gave_up = threading.Event()
    engine.gave_up = gave_up.set
    _, events, done = asked(started, settings(new=1900))
    until(lambda: events)
    started.pair.lose()
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
