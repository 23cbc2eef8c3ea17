"""The noise of coupled sampling has the same bits however it is computed, and picks from the given distribution."""

import math
from functools import cache

import pytest
import torch

from offload.speculation.sampling.noise import Noise, exponential, philox
from offload.speculation.trees.verification import verify_choices
from tests.support.table_models import chi_square_p

CPU = torch.device("cpu")


def distributions(rows, vocab, seed, kept=1.0):
    """Return random distributions that keep a part of the vocabulary."""
    logits = 3 * torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed))
    logits[logits < logits.quantile(1 - kept)] = -math.inf
    return logits.softmax(-1)


@pytest.mark.parametrize(
    ("counter", "seed", "words"),
    [  # Random123's known answers
        ((0, 0, 0, 0), 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((2**32 - 1,) * 4, 2**64 - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_known_answers(counter, seed, words):
    assert " ".join(f"{int(word):08x}" for word in philox([torch.tensor(each) for each in counter], seed)) == words


def test_the_logarithm_is_accurate_at_both_ends_and_between():
    words = torch.cat((torch.arange(100), 2**32 - 1 - torch.arange(100), torch.randint(0, 2**32, (10_000,))))
    exact = -torch.log1p(-(words.double() + 0.5) / 2**32)
    assert ((exponential(words).double() - exact).abs() / exact).max() < 1e-7


def test_the_bits_do_not_depend_on_what_is_computed_together():
    noise, vocab = Noise(2**62 + 5), 1003
    positions = [*range(10, 40), 7, 10**6]
    whole = noise.rows(positions, vocab, CPU)
    assert torch.equal(whole, torch.cat([Noise(2**62 + 5).rows([each], vocab, CPU) for each in positions]))
    tokens = torch.randint(0, vocab, (50,))
    for row, position in zip(whole, positions, strict=True):
        assert torch.equal(noise.of_tokens(torch.full_like(tokens, position), tokens), row[tokens])
    assert torch.equal(noise.rows([12], 40, CPU)[0], whole[2, :40])  # a smaller vocabulary
    assert not torch.equal(Noise(5).rows([12], 40, CPU)[0], whole[2, :40])


@cache
def small_rows(seed, count=12_000, vocab=12):
    """Return the noise of many positions, computed at once."""
    positions, tokens = torch.arange(count).repeat_interleave(vocab), torch.arange(vocab).repeat(count)
    return Noise(seed).of_tokens(positions, tokens).view(count, vocab)


def test_two_distributions_pick_alike_as_often_as_promised():
    p, q = distributions(1, 12, 1), distributions(1, 12, 2)
    noise = small_rows(4)
    equal = float(((p / noise).argmax(-1) == (q / noise).argmax(-1)).double().mean())
    distance = float((p - q).abs().sum() / 2)
    assert (1 - distance) / (1 + distance) - 0.01 < equal < 1 - distance
    exact = (1 / torch.maximum(p.T / p, q.T / q).sum(0)).sum()  # min_j over both of p_i / p_j
    assert equal == pytest.approx(float(exact), abs=0.015)


class KnownNoise(Noise):
    """The noise of a vocabulary of 12, computed at once for many positions."""

    def rows(self, positions, vocab, device):
        return small_rows(self.seed)[positions, :vocab]


def test_children_are_a_sample_without_replacement():
    probs = distributions(1, 4, 3)
    children = KnownNoise(1).best(probs.expand(5000, 4), range(5000), 2)
    p = probs[0].double()
    exact = torch.outer(p, p) / (1 - p).unsqueeze(1)
    found = torch.bincount(4 * children[:, 0] + children[:, 1], minlength=16)
    assert chi_square_p(found, exact.fill_diagonal_(0).flatten()) > 1e-3


def test_children_are_the_best_by_the_noise_and_impossible_tokens_come_last():
    rows = torch.cat((distributions(2, 300, 2), distributions(2, 300, 3, kept=0.01)))  # 3 possible tokens
    rows[1, 5] = 0
    for position in range(3):
        children = Noise(1).best(rows, [position] * 4, 7)
        scores = Noise(1).scores(rows, [position] * 4)
        assert torch.equal(scores.gather(1, children), scores.topk(7).values)
        assert children[:, 0].tolist() == Noise(1).pick(rows, [position] * 4).tolist()
        assert all(len(set(row)) == 7 for row in children.tolist())


@pytest.mark.parametrize(
    ("drafted", "picks", "parents", "expected"),
    [
        ([], [5], None, ([], 5)),
        ([1, 2, 3], [1, 2, 3, 4], None, ([0, 1, 2], 4)),
        ([1, 2, 3], [1, 9, 3, 4], None, ([0], 9)),
        ([1, 2, 3], [7, 2, 3, 4], None, ([], 7)),
        # the root's children 1 and 2; 3 below 1; 3 and 4 below 2
        ([1, 2, 3, 3, 4], [2, 0, 4, 0, 0, 8], [-1, -1, 0, 1, 1], ([1, 4], 8)),
        ([1, 2, 3, 3, 4], [1, 4, 0, 0, 0, 8], [-1, -1, 0, 1, 1], ([0], 4)),
    ],
)
def test_the_path_follows_the_picks(drafted, picks, parents, expected):
    assert verify_choices(drafted, picks, parents) == expected
