"""Eight processes at once on one folder: of the same and of different prompts, with evictions and kills."""

import random

import pytest

from offload.prompt_cache.entries import entries
from offload.prompt_cache.fingerprint import TOKENS
from offload.prompt_cache.folder import PromptFolder
from tests.support.models import ids
from tests.support.prompt_cache import LENGTH, Process, engine_on, files, said

pytestmark = pytest.mark.long
PROMPTS = [ids(LENGTH, seed) for seed in (0, 0, 0, 1, 2, 3)] + [ids(500) + ids(400, seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def plain(model_dir):
    return [said(engine_on(model_dir, None), prompt)[0] for prompt in PROMPTS]


def siege(model_dir, home, plain, rounds=3, warned="", **options):
    """Let eight processes answer at once; return how much each restored in the last round.

    Whatever they warn of contains `warned`.
    """
    for _ in range(rounds):
        processes = [Process(model_dir, home, prompt, **options) for prompt in PROMPTS]
        answers = [process.answer() for process in processes]
        assert [answer[0] for answer in answers] == plain
        warnings = [text for answer in answers for text in answer[2]]
        assert not warnings or (warned and all(warned in text for text in warnings)), warnings
    return [answer[1] for answer in answers]


def test_at_the_limit(model_dir, home, plain):
    """Each process evicts what the others save; the limit is exceeded by what they write between two measurements."""
    said(engine_on(model_dir, home), PROMPTS[0])
    limit = 16 * files(home)[0].stat().st_size
    siege(model_dir, home, plain, warned="limit", limit=limit)
    assert sum(path.stat().st_size for path in files(home)) <= 1.2 * limit


def test_while_others_are_killed(model_dir, home, plain):
    rng = random.Random(0)
    for _ in range(3):
        processes = [Process(model_dir, home, prompt) for prompt in PROMPTS]
        for process in processes[::2]:
            process.kill(rng.random() * 0.1)
        for process, expected in list(zip(processes, plain, strict=True))[1::2]:
            tokens, _, warned = process.answer()
            assert (tokens, warned) == (expected, [])
    siege(model_dir, home, plain, 1)
    assert siege(model_dir, home, plain, 1) == [7 * TOKENS] * len(PROMPTS)
    assert not list(home.glob("*/.part-*"))
    assert sum(entry.prompts for entry in entries(PromptFolder(home))) == len(set(map(tuple, PROMPTS)))
