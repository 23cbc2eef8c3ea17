"""The optimisation of a head: what it learns from a block, the schedule, and checkpoints to resume from.

Step k of a head is taught the target's own distribution behind the tokens that it has been given, with the head's own
rows fed back (training-time test, arXiv 2503.01840). The loss goes over from cross-entropy, which learns faster, to the
total variation distance, which is the rate of rejection (arXiv 2310.08461).
"""

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..model.decoder import Model
from .checkpoint import load_state, save_state
from .head import Head, unrolled
from .rows import Blocks, Shards

DECAY = 0.8  # the weight of each step of a head, relative to the one before
_WARM_UP = 0.05  # of the steps, in which the learning rate rises
_FIRST = 0.5  # of the steps, in which the head is unrolled to its first step alone: most is learned there, at a third
_LEAST = 0.1  # share of the cross-entropy in the loss, at the end
_BETAS = (0.9, 0.95)
_LARGEST_GRADIENT = 1.0


@dataclass(frozen=True)
class Schedule:
    """How a head is trained: optimisation steps, blocks in each, the head's own steps, and the highest rate."""

    steps: int
    batch: int
    depth: int
    rate: float
    seed: int

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step: a linear rise, then a cosine to a twentieth."""
        rise = max(round(_WARM_UP * self.steps), 1)
        if step < rise:
            return self.rate * (step + 1) / rise
        done = (step - rise) / max(self.steps - rise, 1)
        return self.rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))

    def depth_at(self, step: int) -> int:
        """Return to how many of its own steps the head is unrolled."""
        return 1 if step < self._shallow else self.depth

    def cost(self, steps: int) -> int:
        """Return what the first steps cost, in steps that unroll the head once."""
        return min(steps, self._shallow) + self.depth * max(steps - self._shallow, 0)

    @property
    def _shallow(self) -> int:
        return round(_FIRST * self.steps)

    def blocks_at(self, step: int, count: int) -> list[int]:
        """Return which of `count` blocks a step learns from; each comes once in an epoch."""
        found = []
        for number in range(step * self.batch, (step + 1) * self.batch):
            order = list(range(count))
            random.Random(f"{self.seed} {number // count}").shuffle(order)
            found.append(order[number % count])
        return found


class Teacher:
    """The target, as what tells a head the probabilities of its own vocabulary's tokens."""

    def __init__(self, model: Model, draft_ids: Tensor) -> None:
        """`draft_ids` `[vocab]` are the target's ids of the head's tokens."""
        rows = model.output_head.rows(draft_ids).contiguous().clone()
        self.norm, self.rows = model.final_norm.float(), rows.float() * model.shape.logit_scale
        self._model, self.draft_ids = model, draft_ids
        self._narrow = model.with_weights([], model.operations.linear(rows))

    @torch.no_grad()
    def probabilities(self, blocks: Blocks) -> Tensor:
        """Return those behind each token, `[blocks, tokens, vocab]` in fp32; they sum to 1 over all of the target's."""
        logits = self._narrow.logits(blocks.rows.flatten(0, 1)).view(*blocks.ids.shape, -1)
        return (logits - blocks.lse[..., None]).exp_()  # no inference tensor any more

    @torch.no_grad()
    def embedded(self, blocks: Blocks) -> Tensor:
        """Return the rows `[blocks, tokens, hidden]` of the tokens' embeddings."""
        return self._model.embed(blocks.ids.flatten()).float().view(*blocks.ids.shape, -1)


def loss_of(head: Head, teacher: Teacher, blocks: Blocks, depth: int, learned: float) -> Tensor:
    """Return the loss over blocks. `learned` of the schedule is done, from 0 to 1."""
    targets, total = teacher.probabilities(blocks), torch.zeros((), device=blocks.ids.device)
    share = 1 - (1 - _LEAST) * learned
    for step, logits in enumerate(unrolled(head, teacher.embedded(blocks), blocks.taps, depth), 1):
        wanted = targets[:, step : step + logits.shape[1]]
        log_q = logits.float().log_softmax(-1)
        entropy = -(wanted * log_q).sum(-1).mean()
        rejected = 1 - torch.minimum(wanted, log_q.exp()).sum(-1).mean()
        total = total + DECAY ** (step - 1) * (share * entropy + (1 - share) * rejected)
    return total


@dataclass(frozen=True)
class Trained:
    """An optimisation step was done: its loss, and how many of how many are."""

    step: int
    steps: int
    loss: float


class Trainer:
    """Trains a head, from a checkpoint on if there is one."""

    def __init__(self, head: Head, teacher: Teacher, shards: Shards, schedule: Schedule, path: Path) -> None:
        """Raises CheckpointError for a checkpoint at `path` that is damaged or of another head."""
        self.head, self._teacher, self._shards, self.schedule, self._path = head, teacher, shards, schedule, path
        self._optimizer = torch.optim.AdamW(head.parameters(), lr=schedule.rate, betas=_BETAS, weight_decay=0.0)
        self.step = load_state(path, head, self._optimizer) if path.exists() else 0

    def run(self, save_every: float, clock: Callable[[], float] = time.monotonic) -> Iterator[Trained]:
        """Do the steps that are left. The checkpoint is written every `save_every` seconds and when the run ends.

        It also ends when it is closed or interrupted. Raises OSError.
        """
        saved, saved_at = clock(), self.step
        try:
            while self.step < self.schedule.steps:
                loss = self._learn()
                if clock() - saved >= save_every:
                    self.save()
                    saved, saved_at = clock(), self.step
                yield Trained(self.step, self.schedule.steps, loss)
        finally:
            if self.step > saved_at:
                self.save()

    def save(self) -> None:
        """Write the checkpoint."""
        save_state(self._path, self.head, self._optimizer, self.step)

    def _learn(self) -> float:
        schedule, step = self.schedule, self.step
        device = self.head.fc.device
        blocks = self._shards.read(schedule.blocks_at(step, len(self._shards)), device)
        for group in self._optimizer.param_groups:
            group["lr"] = schedule.rate_at(step)
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(self.head, self._teacher, blocks, schedule.depth_at(step), step / schedule.steps)
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), _LARGEST_GRADIENT)
        self._optimizer.step()
        self.step += 1
        return float(loss.detach())


@dataclass(frozen=True)
class Acceptance:
    """The acceptance of each of a head's steps on held-out text, given that those before were accepted.

    `sampled` is that of temperature 1, sum(min(p, q)); `greedy` is how often both find the same token likeliest.
    """

    sampled: tuple[float, ...]
    greedy: tuple[float, ...]


@torch.no_grad()
def acceptance(head: Head, teacher: Teacher, shards: Shards, depth: int, batch: int = 4) -> Acceptance:
    """Return the acceptance over all blocks of some shards."""
    device, sums = head.fc.device, torch.zeros(2, depth, dtype=torch.float64)
    for first in range(0, len(shards), batch):
        numbers = range(first, min(first + batch, len(shards)))
        blocks = shards.read(numbers, device)
        targets = teacher.probabilities(blocks)
        with torch.autocast(device.type, torch.bfloat16):
            for at, logits in enumerate(unrolled(head, teacher.embedded(blocks), blocks.taps, depth)):
                window = slice(at + 1, at + 1 + logits.shape[1])
                q = logits.float().softmax(-1)
                same = teacher.draft_ids[q.argmax(-1)] == blocks.choices[:, window]
                found = torch.minimum(targets[:, window], q).sum(-1).mean(), same.float().mean()
                sums[:, at] += torch.tensor([float(each) for each in found], dtype=torch.float64) * len(numbers)
    sampled, greedy = (sums / len(shards)).tolist()
    return Acceptance(tuple(sampled), tuple(greedy))
