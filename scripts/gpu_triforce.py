"""Measure TriForce against plain decoding with planted acceptance: all passes run, the verdicts are given."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch
from gpu_long import ACCEPTANCE, DRAFT_ACCEPTANCE, Built, LongContext, passes_of
from gpu_machine import Machine
from gpu_models import prompt
from gpu_rows import Rows
from gpu_steps import SAMPLING, draft_runner
from torch import Tensor

from offload.planning.latency import Decoding, predict
from offload.sequence import TokenSequence
from offload.speculation.auto.adaptive import AdaptiveScheduler
from offload.speculation.drafters.drafter import ModelDrafter
from offload.speculation.levels.level import Level, Verifier
from offload.speculation.passes.runner import Runner
from offload.speculation.sampling.warp import Sampler

_GOLDEN = (math.sqrt(5) - 1) / 2


class PlantedVerifier(Verifier):
    """A verifier that runs its passes, and accepts each token of a draft with a given probability.

    The random numbers are spread evenly (multiples of the golden ratio), so that a few verifications accept as many
    tokens as the average of many.
    """

    def __init__(self, name: str, runner: Runner, sampler: Sampler, rate: float) -> None:
        super().__init__(name, runner, sampler)
        self._rate, self._cycles = rate, 0

    def score(self, sequence: TokenSequence, draft: list[int], parents: Sequence[int] | None = None) -> Tensor:
        rows = super().score(sequence, draft, parents)
        accepted = self.accepted(len(draft)) if draft else 0
        following = [*draft[:accepted], *((token + 1) % rows.shape[1] for token in draft[accepted:]), 1]
        return torch.nn.functional.one_hot(torch.tensor(following, device=rows.device), rows.shape[1]).to(rows.dtype)

    def accepted(self, drafted: int) -> int:
        """Return how many tokens of the next draft are accepted: as many as come before the first refusal."""
        self._cycles += 1
        chance = 1 - self._cycles * _GOLDEN % 1  # in (0, 1]
        return min(drafted, int(math.log(chance) / math.log(self._rate)))


def triforce(machine: Machine, long: LongContext, rows: Rows) -> dict:
    """Measure plain decoding and TriForce at 128K, and compare the speed-up with the predicted one."""
    built = long.built
    passes = passes_of(built.plan, "stream")
    predicted, plain = predict(passes, "triforce"), predict(passes, "ar")
    cycles = 3 if machine.small else 5
    ar = _decode(machine, _plain(machine, built), built.tokens, 2)
    rows.compare("plain decoding", ar, plain.tbt.seconds)
    top = _triforce(machine, built, predicted)
    tri = _decode(machine, top, built.tokens, cycles)
    gammas = f"gamma {predicted.gamma1} and {predicted.gamma2}, acceptance {DRAFT_ACCEPTANCE} and {ACCEPTANCE}"
    rows.compare("TriForce", tri, predicted.tbt.seconds, remark=gammas)
    rows.compare("speed-up", ar / tri, plain.tbt.seconds / predicted.tbt.seconds, "x")
    machine.compare_peak(rows, built.plan)
    long.free()
    return {"plain_s": ar, "triforce_s": tri}


def _sampler(machine: Machine, built: Built) -> Sampler:
    return Sampler(SAMPLING, 0, built.model.shape.vocab, machine.device)


def _plain(machine: Machine, built: Built) -> Level:
    sampler = _sampler(machine, built)
    return Level("target", Verifier("full", built.full, sampler), AdaptiveScheduler(), sampler.generator)


def _triforce(machine: Machine, built: Built, predicted: Decoding) -> Level:
    """Return the draft model, the retrieval cache and the full cache as levels, with planted acceptance."""
    sampler, request = _sampler(machine, built), built.plan.request
    drafter = ModelDrafter(draft_runner(machine, request.draft, request.speculation), sampler)
    middle = PlantedVerifier("retrieval", built.middle, sampler, DRAFT_ACCEPTANCE)
    lower = Level("retrieval", middle, AdaptiveScheduler([drafter], predicted.gamma1), sampler.generator)
    full = PlantedVerifier("full", built.full, sampler, ACCEPTANCE)
    return Level("target", full, AdaptiveScheduler([lower], predicted.gamma2), sampler.generator)


@torch.inference_mode()
def _decode(machine: Machine, top: Level, tokens: int, cycles: int) -> float:
    """Return the seconds per token of so many verifications, after two."""
    sequence = TokenSequence([*prompt(tokens), 1])
    for cycle in range(cycles + 2):
        if cycle == 2:
            machine.synchronize()
            start, before = time.perf_counter(), len(sequence)
        top.advance(sequence, 64)
        sequence.commit()
    machine.synchronize()
    return (time.perf_counter() - start) / (len(sequence) - before)
