"""The states of layers with linear attention: rollbacks, interruptions, and copies for other caches."""

import random

import pytest
import torch

from offload.architecture.dims import LinearAttention
from offload.caches.recurrent_states import States
from offload.kernels.delta_rule import DeltaRule, run_delta_rule
from tests.support.offloading import native_kernel

CPU = torch.device("cpu")
SIZES = LinearAttention(key_heads=1, value_heads=2, key_dim=16, value_dim=16, kernel=4, layers=2)


class Sequence:
    """A sequence with random inputs, and its states behind every token: those that outputs are compared with.

    The inputs of a position are those of the last pass over it, as after a rejected draft.
    """

    def __init__(self, kernel):
        self.states, self.length, self.kernel = States(SIZES, torch.float32, CPU, kernel), 0, kernel
        self.random = torch.Generator().manual_seed(0)
        sizes = (4, SIZES.width), (2,), (2,)
        values = [[torch.randn(size, generator=self.random) for size in sizes] for _ in range(SIZES.layers)]
        self.rules = [DeltaRule(SIZES, conv, -decay.abs(), bias) for conv, decay, bias in values]
        self.inputs = [(torch.zeros(3, SIZES.width), torch.zeros(0, 4)) for _ in range(SIZES.layers)]
        self.behind = [[torch.zeros(2, 16, 16)] for _ in range(SIZES.layers)]

    def begin(self, count):
        self.states.begin(self.length, count)
        for layer, (rows, gates) in enumerate(self.inputs):
            new = (torch.randn(count, width, generator=self.random) for width in (SIZES.width, 4))
            old = rows[: 3 + self.length], gates[: self.length]
            self.inputs[layer] = tuple(map(torch.cat, zip(old, new, strict=True)))

    def attend(self, layer, count, parts=1):
        rows, gates = (x[-count:].chunk(parts) for x in self.inputs[layer])
        rule = self.rules[layer]
        return torch.cat([self.states.attend(layer, rule, *some) for some in zip(rows, gates, strict=True)])

    def run(self, count, parts=1):
        """Run a pass, commit it, and compare."""
        self.begin(count)
        found = [self.attend(layer, count, parts) for layer in range(SIZES.layers)]
        self.states.commit()
        for layer, each in enumerate(found):
            expected = self.expected(layer, count)
            assert torch.equal(each, expected) if self.kernel else (each - expected).abs().max() < 1e-4
        self.length += count

    def expected(self, layer, count):
        """Compute the last tokens one by one from the state before them."""
        (rows, gates), behind, found = self.inputs[layer], self.behind[layer], []
        del behind[self.length + 1 :]
        for at in range(self.length, self.length + count):
            behind.append(behind[-1].clone())
            one = rows[at : at + 3], rows[at + 3 : at + 4], gates[at : at + 1]
            found.append(run_delta_rule(self.rules[layer], *one, behind[-1], self.kernel))
        return torch.cat(found)

    def roll_back(self, count):
        self.length -= count
        assert self.states.covers(self.length)
        self.states.truncate(self.length)


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.skipif(not native_kernel(), reason="no kernel"))])
def sequence(request):
    return Sequence(native_kernel() if request.param else None)


def test_any_passes_and_rollbacks_give_the_outputs_of_the_tokens_that_stay(sequence):
    numbers = random.Random(1)
    sequence.run(300, parts=3)
    while sequence.length < 700:
        count = numbers.choice((1, 2, 5, 20, 33))
        sequence.run(count)
        sequence.roll_back(numbers.randrange(min(count, 32) + 1))


@pytest.mark.daily("False-100", "True-*")
@pytest.mark.parametrize("count", [3, 100, 500])
def test_an_interrupted_pass_has_not_happened(sequence, count):
    sequence.run(400)
    for _ in range(130):
        sequence.run(1)
    for _ in range(2):
        sequence.begin(count)
        sequence.attend(0, count)
        sequence.run(2)
    sequence.roll_back(20)
    sequence.run(500)


def test_copies_and_dumps_go_on_alike(sequence):
    sequence.run(300)
    copied, dumped = sequence.states.like(), sequence.states.like()
    copied.copy(sequence.states, 280)
    dumped.load(280, sequence.states.dump(280))
    sequence.length = 280
    for states in (copied, dumped):
        assert states.covers(280) and not states.covers(279) and not states.covers(281)
        sequence.states = states
        sequence.run(5)
        sequence.roll_back(5)


def test_skipped_tokens_leave_the_states_as_they_were(sequence):
    sequence.run(10)
    other = sequence.states.like()
    other.copy(sequence.states, 10)
    sequence.states.skip(10, 90)
    assert sequence.states.covers(90) and not sequence.states.covers(10)
    assert torch.equal(sequence.states.dump(90), other.dump(10))
