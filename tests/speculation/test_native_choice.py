"""The kernel's choices among logits: the distributions of `warp` and of the penalties, and tokens drawn from them."""

import random

import numpy as np
import pytest
import torch

from offload.errors import TriforceError
from offload.kernels.native import KernelUnavailable, find_kernel
from offload.settings.config import Sampling
from offload.speculation.sampling.native_choice import NativeChoice
from offload.speculation.sampling.noise import Noise
from offload.speculation.sampling.penalties import Penalties
from offload.speculation.sampling.warp import Sampler, warp, warp_by
from tests.support.table_models import chi_square_p

CPU = torch.device("cpu")
LEVELS = ("avx512", "avx2", "neon", "portable")


def kernel(level="auto"):
    try:
        return find_kernel(level)
    except KernelUnavailable as reason:
        pytest.skip(str(reason))


def logits(rows, vocab, seed=1):
    return 3 * torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed))


SAMPLINGS = [
    Sampling(temperature=0),
    Sampling(temperature=1, top_p=1),
    Sampling(temperature=0.3, top_p=0.9),
    Sampling(temperature=1, top_p=1, top_k=5),
    Sampling(temperature=2, top_p=0.8, top_k=40, min_p=0.05),
    Sampling(temperature=1, top_p=1, min_p=0.2),
    Sampling(temperature=0.7, top_p=1e-9),
    Sampling(temperature=1, top_p=1, min_p=1),
]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("vocab", [7, 64, 1003])
def test_distributions_are_those_of_torch(level, vocab):
    rows = logits(3, vocab)
    rows[1, :5] = float("-inf")
    for sampling in SAMPLINGS:
        found, expected = warp_by(kernel(level), rows, sampling), warp(rows, sampling)
        torch.testing.assert_close(found, expected, rtol=5e-6, atol=1e-37, msg=str(sampling))


def test_of_equal_logits_the_same_are_kept_and_chosen_as_by_torch():
    rows = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0, 1.0, 1.0] * 3])
    for sampling in (Sampling(temperature=1, top_p=0.35), Sampling(temperature=1, top_p=1, top_k=2)):
        torch.testing.assert_close(warp_by(kernel(), rows, sampling), warp(rows, sampling))
    assert Sampler(Sampling(temperature=0), 0, 21, CPU, kernel=kernel()).choose(rows, [0]) == [1]


def random_sampling(pick):
    return Sampling(
        temperature=pick.choice([0.0, 1.0]),
        top_p=1,
        repetition_penalty=pick.choice([1.0, 1.3]),
        frequency_penalty=pick.choice([0.0, 0.6, -1.3]),
        presence_penalty=pick.choice([0.0, 1.1]),
        dry_multiplier=pick.choice([0.0, 0.8]),
        dry_base=pick.choice([1.0, 1.75]),
        dry_allowed_length=pick.randint(1, 3),
        dry_range=pick.choice([0, 6]),
        no_repeat_ngram=pick.randint(0, 3),
    )


def test_penalties_are_those_of_torch():
    for seed in range(300):
        check_penalties(random_sampling(random.Random(seed)), random.Random(seed), 12)


def check_penalties(sampling, pick, vocab):
    prompt, generated, draft = ([pick.randrange(6) for _ in range(pick.randrange(most))] for most in (20, 20, 6))
    scores = logits(pick.randint(1, len(draft) + 1), vocab, pick.randrange(10**6))
    found = []
    for by in (None, kernel()):
        sampler = Sampler(sampling, 0, vocab, CPU, [5], by)
        sampler.observe_prompt(prompt)
        sampler.observe(generated)
        found.append(sampler.distribution(scores, draft))
        again = sampler.distribution(scores[:1])  # a draft leaves no trace
        found.append(again)
    torch.testing.assert_close(found[:2], found[2:], rtol=5e-6, atol=1e-37, msg=str(sampling))


@pytest.mark.parametrize("coupled", [False, True])
def test_tokens_are_drawn_from_the_distribution(coupled):
    sampling, rows = Sampling(temperature=0.8, top_p=0.9, min_p=0.02, coupled=coupled), logits(1, 40)
    sampler = Sampler(sampling, 3, 40, CPU, kernel=kernel())
    counts = torch.tensor([sampler.choose(rows, [each])[0] for each in range(2000)]).bincount(minlength=40)
    assert chi_square_p(counts, warp(rows, sampling)[0].double()) > 1e-3


def test_plain_tokens_are_those_of_torch_s_random_numbers_and_noise():
    rows = logits(1, 1003)
    for coupled in (False, True):
        sampling = Sampling(temperature=1, top_p=1, coupled=coupled)
        by_torch, by_kernel = (Sampler(sampling, 7, 1003, CPU, kernel=each) for each in (None, kernel()))
        for position in range(40):
            assert by_torch.choose(rows, [position]) == by_kernel.choose(rows, [position])


def test_scores_that_are_too_close_are_left_to_the_exact_bits():
    noise = Noise(3).rows([4], 64, CPU)[0]
    tied = (noise / noise.sum()).log()[None]  # all scores are equal but for rounding
    by_torch, by_kernel = (
        Sampler(Sampling(temperature=1, top_p=1, coupled=True), 3, 64, CPU, kernel=each) for each in (None, kernel())
    )
    probs = by_kernel.distribution(tied)
    assert by_kernel.choose(tied, [4]) == Noise(3).pick(probs, [4]).tolist()
    assert by_torch.choose(tied, [4])[0] in range(64)


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(temperature=1)], ids=["greedy", "warm"])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_an_error(sampling, wrong):
    rows = logits(2, 33)
    rows[1, 32] = wrong
    sampler = Sampler(sampling, 0, 33, CPU, kernel=kernel())
    assert sampler.distribution(rows).isnan().all(dim=1).tolist() == [False, True]
    with pytest.raises(TriforceError, match="no numbers"):
        sampler.choose(rows, [0, 1])
    with pytest.raises(TriforceError, match="no numbers"):
        sampler.choose(torch.full((1, 33), float("-inf")), [0])


def test_an_interrupt_while_the_history_moves_leaves_it_whole(monkeypatch):
    penalties = Penalties(Sampling(no_repeat_ngram=2), 10, CPU)
    penalties.observe([1, 2, 3])

    class Interrupting(np.ndarray):
        @property
        def ctypes(self):
            raise KeyboardInterrupt

    joined = np.concatenate
    with monkeypatch.context() as patch:
        patch.setattr(np, "concatenate", lambda arrays: joined(arrays).view(Interrupting))
        with pytest.raises(KeyboardInterrupt):
            penalties.observe([4] * 2000)
    penalties.observe([5, 6])
    penalties.follow([7])
    found = penalties._history.view([7])
    assert found.tolist() == [1, 2, 3, 5, 6, 7] and found.ctypes.data == penalties.terms.tokens


def test_memory_of_probabilities_does_not_depend_on_torch_s_default_type():
    torch.set_default_dtype(torch.bfloat16)
    try:
        choice = NativeChoice(kernel(), Sampling(temperature=1, coupled=True), 40, noise=Noise(3))
    finally:
        torch.set_default_dtype(torch.float32)
    assert choice._coupled[1].nbytes == 4 * 40
