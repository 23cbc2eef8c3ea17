"""Table models: the next of 8 tokens depends on the last two, so that all outputs can be enumerated."""

import itertools
import random
from types import SimpleNamespace

import torch

from offload.parallel import ALONE
from offload.sequence import TokenSequence
from offload.settings.config import Sampling, Speculation
from offload.speculation.drafters.ngram import LookupDrafter
from offload.speculation.levels.hierarchy import Runners, build
from offload.speculation.passes.estimators import ROW_COST
from offload.speculation.sampling.warp import Sampler, warp

VOCAB = 8
PROMPT = [3, 1, 4, 1, 5, 1, 4, 1]  # repetitive, so that lookup has something to propose

TOKENS = 3
BREAKERS = [5]  # of DRY


def table(seed: int, sharpness: float = 1.5) -> torch.Tensor:
    """Logits `[last but one, last, next]`."""
    return sharpness * torch.randn((VOCAB, VOCAB, VOCAB), generator=torch.Generator().manual_seed(seed))


TARGET = table(1)
MIDDLE = TARGET + 0.7 * table(4)  # like the target, but not the same
DRAFTS = {
    "good": TARGET + 0.5 * table(2),
    "uniform": torch.zeros_like(TARGET),
    "adversarial": -2 * TARGET,
    "one-hot": torch.full_like(TARGET, -50).scatter(2, table(3).argmax(2, keepdim=True), 50.0),
}


class ReadySampler(Sampler):
    """A sampler whose rows are distributions already: the whole table is warped once."""

    def distribution(self, logits, tentative=(), paths=None):
        return logits


class TableModel:
    """Hidden rows are states: the last two tokens as one number."""

    device, group = torch.device("cpu"), ALONE

    def __init__(self, logits: torch.Tensor) -> None:
        self.shape = SimpleNamespace(vocab=VOCAB)
        self._logits = logits.flatten(0, 1)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self._logits[states]


class TableRunner:
    """A Runner whose rows come from a table instead of a cache."""

    relative_cost = 0.5
    setups = 0

    def __init__(self, logits: torch.Tensor) -> None:
        self.model = TableModel(logits)

    def row_cost(self) -> float:
        return ROW_COST

    def rows(self, sequence, draft=(), parents=None):
        self._nodes = torch.empty(0, dtype=torch.long)
        if parents is not None:
            root = self.rows(sequence)
            return torch.cat((root, self.forward(torch.tensor(draft), parents)))
        text = [*sequence.tokens[-2:], *draft]
        self._states = torch.tensor([a * VOCAB + b for a, b in itertools.pairwise(text)])
        return self._states

    def deepest_tree(self, sequence):
        return 99

    def logits(self, hidden):
        return self.model.logits(hidden)

    def forward(self, ids, parents=None):
        if parents is None:
            self._states = self._states[-1:] % VOCAB * VOCAB + ids
            return self._states
        first = len(self._nodes)
        for token, parent in zip(ids, parents, strict=True):
            above = self._states[-1:] if parent < 0 else self._nodes[parent : parent + 1]
            self._nodes = torch.cat((self._nodes, above % VOCAB * VOCAB + token))
        return self._nodes[first:]

    def resolve(self, ids):
        pass

    def settle(self, sequence):
        pass

    def setup_cost(self, sequence):
        return 0.0

    def observe(self, drafted, accepted):
        pass


def warped(logits, sampling):
    """Return the warped table, so that the many runs need not warp."""
    return warp(logits.flatten(0, 1), sampling).view_as(logits)


def hierarchy(
    method,
    draft,
    sampling,
    gammas=(None, None),
    group=ALONE,
    penalised=False,
    noise=None,
    masks=None,
    **trees,
):
    """Build a method over tables, with a seeded clock that makes every choice the best one sometimes.

    Each rank of a group has other random numbers and another clock. With `penalised`, the penalties of `sampling`
    apply, which the table cannot contain; with `masks`, those of a constraint. With `noise`,
    sampling is coupled.
    """
    settings = Speculation(method, "a model" if draft in DRAFTS else draft, gamma1=gammas[0], gamma2=gammas[1], **trees)
    tables = [TARGET, MIDDLE, DRAFTS.get(draft, TARGET)]
    full, middle, drafting = (TableRunner(each if penalised else warped(each, sampling)) for each in tables)
    has_middle = method in ("triforce", "retrieval", "streaming", "auto")
    runners = Runners(full, middle if has_middle else None, drafting if draft in DRAFTS else None, LookupDrafter())
    if penalised:
        sampler = Sampler(sampling, group.rank, VOCAB, torch.device("cpu"), BREAKERS, masks=masks)
        sampler.observe_prompt(PROMPT)
    else:
        sampler = ReadySampler(Sampling(temperature=1, top_p=1), group.rank, VOCAB, torch.device("cpu"))
    sampler.noise = noise
    delays = random.Random(group.rank)
    times = itertools.accumulate(delays.expovariate(1) for _ in itertools.count())
    return build(runners, settings, sampler, clock=lambda: next(times), group=group)


def counted(top, runs):
    """Count each combination of first tokens over many continuations of the prompt, `[VOCAB ** TOKENS]`."""
    counts = torch.zeros(VOCAB**TOKENS, dtype=torch.long)
    sequence = TokenSequence()
    for _ in range(runs):
        sequence.restart(PROMPT)
        while len(sequence) < len(PROMPT) + TOKENS:
            top.advance(sequence, TOKENS + 1)
        counts[number(sequence.tokens[len(PROMPT) : len(PROMPT) + TOKENS])] += 1
    return counts


def p_value(top, sampling, runs):
    """Return the p-value of a level's tokens against the exact distribution of plain decoding."""
    return chi_square_p(counted(top, runs), joint(warped(TARGET, sampling), TOKENS))


def joint(probs: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the exact distribution of the first tokens after PROMPT, `[VOCAB ** tokens]`, from plain decoding."""
    result = torch.zeros(VOCAB**tokens, dtype=torch.float64)
    for number, run in enumerate(itertools.product(range(VOCAB), repeat=tokens)):
        text, chance = PROMPT[-2:], 1.0
        for token in run:
            chance *= float(probs[text[-2], text[-1], token])
            text = [*text, token]
        result[number] = chance
    return result


def penalised_joint(sampling: Sampling) -> torch.Tensor:
    """`joint` with the penalties of `sampling`, from plain decoding after every prefix."""
    result = torch.ones(VOCAB**TOKENS, dtype=torch.float64)
    for length in range(TOKENS):
        for prefix in itertools.product(range(VOCAB), repeat=length):
            text = [*PROMPT, *prefix]
            sampler = Sampler(sampling, 0, VOCAB, torch.device("cpu"), BREAKERS)
            sampler.observe_prompt(PROMPT)
            sampler.observe(prefix)
            probs = sampler.distribution(TARGET[text[-2], text[-1]].unsqueeze(0))[0].double()
            block = VOCAB ** (TOKENS - length)  # runs that begin with the prefix
            start = number(prefix) * block
            result[start : start + block] *= probs.repeat_interleave(block // VOCAB)
    return result


def number(run) -> int:
    """Return the index of a combination of tokens in `joint`."""
    place = 0
    for token in run:
        place = place * VOCAB + token
    return place


def chi_square_p(counts: torch.Tensor, chances: torch.Tensor) -> float:
    """Return the p-value of a chi-square test; rare cells are pooled. 0 if something impossible was counted."""
    if counts[chances == 0].sum() > 0:
        return 0.0
    expected = chances * counts.sum()
    rare = expected < 5
    counts = torch.cat((counts[~rare], counts[rare].sum(0, keepdim=True))).double()
    expected = torch.cat((expected[~rare], expected[rare].sum(0, keepdim=True)))
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2.0).double(), statistic / 2))
