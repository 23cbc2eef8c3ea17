"""Disks that are slower than computing: reading and writing stop, the run continues."""

import time

import pytest

from offload import GenerationConfig, Sampling
from offload.caches.full import FullCache
from offload.errors import Degraded
from offload.prompt_cache import restore as restoring
from offload.prompt_cache import writer as saving
from offload.prompt_cache.fingerprint import TOKENS
from offload.prompt_cache.restore import Race
from tests.support.models import ids
from tests.support.prompt_cache import LENGTH, engine_on, files, said


def test_blocks_that_were_run_before_an_interrupt_are_saved(model_dir, home):
    prompt = ids(LENGTH)
    expected, _ = said(engine_on(model_dir, None), prompt)
    events = engine_on(model_dir, home).generate(prompt, Sampling(temperature=0), GenerationConfig())
    while next(events).done < 5 * TOKENS:
        assert len(files(home)) < 6
    events.close()
    assert (there := len(files(home))) in (4, 5)
    assert said(engine_on(model_dir, home), prompt) == (expected, there * TOKENS)


def test_saving_stops_on_a_disk_that_is_slower_than_the_prefill(model_dir, home, monkeypatch):
    prompt = ids(3 * LENGTH)
    expected, _ = said(engine_on(model_dir, None), prompt)
    limit = saving.BlockWriter._limit_delay
    monkeypatch.setattr(saving.BlockWriter, "_limit_delay", lambda writer, _: limit(writer, 10.0))  # of any machine
    monkeypatch.setattr(saving, "PATIENCE", 15.0)
    with pytest.warns(Degraded, match="slower than the prefill"):
        assert said(engine_on(model_dir, home), prompt)[0] == expected
    assert 0 < len(files(home)) < 20


def test_no_more_blocks_than_planned_are_in_memory_until_they_are_written(model_dir, home, monkeypatch):
    copied, most, dump, write = [], [], FullCache.dump, saving.write_block

    def dumped(cache, start, end):
        copied.append(start)
        most.append(len(copied))
        return dump(cache, start, end)

    def written(*args):
        time.sleep(0.01)
        copied.pop()
        return write(*args)

    monkeypatch.setattr(FullCache, "dump", dumped)
    monkeypatch.setattr(saving, "write_block", written)
    said(engine_on(model_dir, home), ids(LENGTH))
    assert len(files(home)) == len(most) > 2 >= max(most)


def test_reading_that_takes_longer_than_computing_stops(monkeypatch):
    monkeypatch.setattr(restoring, "TRIAL", 1.0)
    race = Race()
    race.observe(9.0, 0.1)  # the first block's time is that of starting, too
    for _ in range(4):
        race.observe(0.2, 0.1)
    assert not race.lost  # below TRIAL seconds
    race.observe(0.4, 0.1)
    assert race.lost
    race.observe(0.01, 1.0)
    assert not race.lost


def test_restoring_from_a_slow_disk_stops(model_dir, home, monkeypatch):
    prompt = ids(LENGTH)
    expected, _ = said(engine_on(model_dir, home), prompt)
    observe = Race.observe
    monkeypatch.setattr(Race, "observe", lambda race, reading, computing: observe(race, 0.15, 0.01))  # of any machine
    monkeypatch.setattr(restoring, "TRIAL", 0.25)
    tokens, restored = said(engine_on(model_dir, home), prompt)
    assert tokens == expected
    assert 2 * TOKENS <= restored <= 4 * TOKENS  # two threads read ahead
