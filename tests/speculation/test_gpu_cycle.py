"""What a cycle of speculation launches and waits for on a GPU, seen on fake tensors of real shapes."""

import pytest
import torch

from offload.caches.factory import draft_cache
from offload.sequence import TokenSequence
from offload.settings.config import Sampling, Speculation
from offload.speculation.auto.adaptive import AdaptiveScheduler
from offload.speculation.drafters.model_drafter import ModelDrafter
from offload.speculation.levels.level import Level
from offload.speculation.passes.draft_runner import DraftRunner
from offload.speculation.passes.runner import Runner
from offload.speculation.sampling import warp as sampling_module
from offload.speculation.sampling.noise import Noise
from offload.speculation.sampling.warp import Sampler, warp
from tests.support.fake_cuda import GPU, fake_cuda
from tests.support.fake_models import fake_shape, load_fake

GAMMA, PROMPT = 6, 40
DRAFT = {"hidden_size": 768, "num_attention_heads": 12, "num_key_value_heads": 12, "intermediate_size": 3072}
LAUNCHES = [  # of a distribution
    (Sampling(temperature=0), 5),
    (Sampling(), 13),  # with top-p
    (Sampling(top_p=1, top_k=50), 7),
    (Sampling(top_p=1, min_p=0.05), 9),
    (Sampling(top_k=50, min_p=0.05), 21),
]
NOISE_LAUNCHES = 200  # of a block of 16 positions


@pytest.fixture
def downloads(monkeypatch):
    """Counts what the host reads from the device, and gives it zeros: the first draft token is rejected."""
    found = []

    def download(values):
        found.append(len(values))
        return [0] * values.to(torch.device("cpu")).numel()

    monkeypatch.setattr(
        "offload.speculation.passes.runner.graphs_for", lambda model, cache: None
    )  # none can be recorded
    monkeypatch.setattr(sampling_module, "download", download)
    monkeypatch.setattr("offload.speculation.drafters.model_drafter.download", download)
    return found


def level(sampling):
    """Return a level of a draft model under a target of Llama-2-7B's shape, and a sequence that both have read."""
    target, draft = load_fake(fake_shape("7B", 2)), load_fake(fake_shape("7B", 2, **DRAFT))
    sampler = Sampler(sampling, 0, target.shape.vocab, GPU)
    settings = Speculation("naive", "a model", window=64)
    full = Runner(target, target.new_cache(4096))
    drafting = DraftRunner(draft, draft_cache(draft, settings), 64)
    sequence = TokenSequence(range(PROMPT))
    list(full.prefill(sequence))
    list(drafting.read(sequence))
    scheduler = AdaptiveScheduler([ModelDrafter(drafting, sampler)], GAMMA)
    found = Level("target", full, sampler, scheduler)
    found.advance(sequence, GAMMA + 1)  # the first step is plain
    return found, sequence


def test_a_greedy_cycle_of_a_draft_model_waits_twice_and_a_plain_step_once(downloads):
    with fake_cuda() as usage:
        top, sequence = level(Sampling(temperature=0))
        before, known = usage.waits, len(downloads)
        for _ in range(3):
            top.advance(sequence, GAMMA + 1)
        cycles = usage.waits
        top.advance(sequence, 1)
    assert cycles - before == 6
    # The draft's tokens; the target's choices. Each with a flag for logits that are no numbers.
    assert downloads[known:] == [GAMMA + 1, GAMMA + 2] * 3 + [2]
    assert usage.waits - cycles == 1


def test_the_noise_of_16_positions_is_computed_at_once_and_waits_for_nothing():
    with fake_cuda() as usage:
        noise = Noise(1)
        row = torch.empty((1, 32000), device=GPU)
        with usage.of() as launches:
            for position in range(32, 48):
                noise.pick(row, [position])
        with usage.of() as verification:
            noise.pick(row.expand(8, -1), range(34, 42))
    assert sum(launches.values()) <= NOISE_LAUNCHES + 3 * 16
    assert sum(verification.values()) <= 3
    assert usage.waits == 0


@pytest.mark.parametrize("vocab", [32000, 128256])
@pytest.mark.parametrize(("sampling", "most"), LAUNCHES)
def test_the_launches_of_a_distribution_do_not_grow_with_its_rows(sampling, most, vocab):
    with fake_cuda() as usage:
        for rows in (1, 2, 8, 22):
            logits = torch.empty((rows, vocab), device=GPU)
            with usage.of() as launches:
                assert warp(logits, sampling).shape == logits.shape
            assert sum(launches.values()) <= most
    assert usage.waits == 0
