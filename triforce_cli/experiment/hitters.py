"""Measures on how few tokens attention falls, by layer and by rank, and what masking those tokens does."""

from collections.abc import Generator
from dataclasses import replace

import torch
from torch import Tensor

from offload.evaluation.heavy_hitters import Concentration, concentration, heaviest, mean_map, score_masked
from offload.evaluation.teacher_forcing import perplexity
from offload.events import Prefilled
from offload.settings.config import Speculation
from offload.speculation.passes.runner import Runner

from ..bench.compared import EXACT
from ..bench.report import Measure, Report
from ..output.format import percent
from .grid import HITTERS, KINDS, MASKED
from .overrides import ExperimentRequest
from .points import Inputs
from .selections import Rows, Run, measure_texts

SHARE = 0.05  # of the tokens
SINK, PIECE = 4, 16  # tokens of the sink; of a piece of text whose attention is drawn, as in StreamingLLM's figure 2
SHOWN = (Measure("masked_perplexity", f"perplexity with {percent(SHARE)} of the tokens masked", "{:.2f}".format),)
PROFILES = (
    Measure("kept_by_layer", f"share of the attention on {percent(SHARE)} of the tokens, by layer", percent),
    Measure("sparsity_by_layer", "share of the tokens with under 1 % of the largest weight, by layer", percent),
    Measure("received_by_rank", "attention received, in queries' worth, by the rank of the token", "{:.3g}".format),
)
MAP = Measure("map", "mean attention by layer, query and key", "{:.2f}".format)  # for a picture alone
_LAYERS = (0, 1, 2, 9, 16, 23, 31)  # of the map, as in that figure


def measure_hitters(inputs: Inputs) -> tuple[Report, bool]:
    """Measure attention and mask tokens on each text; return and raise as `measure_texts`."""
    found, ended = measure_texts(inputs, _run_of, SHOWN, (*PROFILES, MAP))
    return replace(found, profiles=PROFILES), ended


def _run_of(asked: ExperimentRequest, context: int, given: Speculation, ids: list[int]) -> Run:
    point = (("context", context),) if "context" in asked.grid.varied else ()
    last = asked.grid.last

    def run(runner: Runner) -> Generator[Prefilled, None, Rows]:
        prompt = ids[: len(ids) - last - 1]  # masked are tokens before the one that the first is predicted from
        found = yield from concentration(runner, prompt, SHARE)
        of_exact = _profiles(found) | {MAP.name: _flat(mean_map(runner, prompt, PIECE))}
        rows: Rows = {}
        masked = _masked(found.received, round(SHARE * len(prompt)))
        for name in KINDS[HITTERS].parse(asked.grid.methods):
            scores = yield from score_masked(runner.model, ids, last, masked[name])
            profiles = of_exact if name == EXACT else {each.name: {} for each in (*PROFILES, MAP)}
            rows[name, point] = {"masked_perplexity": perplexity(scores.log_probs), **profiles}
        return rows

    return run


def _masked(received: Tensor, count: int) -> dict[str, Tensor | None]:
    """Return which tokens are masked, by name, as many of each layer and KV head."""
    draws = torch.rand(received.shape, generator=torch.Generator().manual_seed(0))
    found = heaviest(received, count), heaviest(received, count, SINK), heaviest(draws, count, SINK)
    return dict(zip(MASKED, (None, *found), strict=True))


def _profiles(found: Concentration) -> dict[str, dict[str, float]]:
    ranked = found.received.sort(dim=2, descending=True).values.mean((0, 1)) / found.received[0, 0].sum()
    ranked *= found.received.shape[2]
    ranks = [2**power for power in range(len(ranked).bit_length())]
    return {
        "kept_by_layer": {str(layer): float(each) for layer, each in enumerate(found.kept)},
        "sparsity_by_layer": {str(layer): float(each) for layer, each in enumerate(found.sparsity)},
        "received_by_rank": {str(rank): float(ranked[rank - 1]) for rank in ranks},
    }


def _flat(weights: Tensor) -> dict[str, float]:
    """Return weights `[layers, queries, keys]` of some layers, by "layer query key"."""
    layers = dict.fromkeys(min(layer, len(weights) - 1) for layer in _LAYERS)
    queries = range(weights.shape[1])
    return {f"{la} {q} {k}": float(weights[la, q, k]) for la in layers for q in queries for k in range(q + 1)}
