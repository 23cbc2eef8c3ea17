#!/usr/bin/env python3
"""Print the published values of TriForce, Sequoia and SpecInfer beside this program's plans, and what is measured here.

    python scripts/papers.py                                   all tables, planned: seconds, nothing is loaded
    python scripts/papers.py off-chip levels                   some of them
    python scripts/papers.py temperature --measure pg19.txt    also run those rows whose GPU this machine has
    python scripts/papers.py levels --measure book.txt --model smollm2-135m --context 2K    any machine, another model

A plan says how fast this program should be with the paper's models, settings and acceptance. The column `authors' code`
says how long the papers' own code takes by the same bytes and operations, with what it does beside them
(docs/planning.md). Acceptance is a rate a token. TriForce: arXiv 2404.11912; Sequoia: arXiv 2402.12374v3 and its
project page; SpecInfer (arXiv 2305.09781) as Sequoia's tables report it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from offload.hardware import profiles
from offload.hardware.rates import READ, describe
from offload.loading.hub.download import dimensions
from offload.planning.inputs import PlanInputs
from offload.planning.latency import Decoding, draft_acceptance
from offload.planning.passes import Passes
from offload.planning.plan import Plan, make_plan
from offload.planning.roofline import ALL_REDUCE_S, SAMPLE_S
from offload.settings.config import Placement, Speculation
from offload.settings.methods import METHODS
from offload.units import GIB

# NVIDIA Turing architecture white paper: fp16 with fp32 accumulation, for there are no bf16 units.
_RTX_2080_TI = profiles.Profile(
    "rtx-2080-ti",
    "One GeForce RTX 2080 Ti (11 GiB) on PCIe 3.0",
    "cuda",
    1,
    profiles.Gpu("NVIDIA GeForce RTX 2080 Ti", 11, 616, 53.8),
    profiles.Link("PCIe 3.0 x16", 12.5),
    options={"dtype": "float16", "prefill_chunk": 1024},
)


class Setup(NamedTuple):
    """What a row was measured with: the hardware profile, the models, and the paper's settings.

    `acceptance` is the rate at which the full cache accepts the retrieval level's tokens, `draft_acceptance` that at
    which the level above the draft model accepts the draft's.
    """

    gpu: str
    model: str
    tokens: int
    method: str = "ar"
    draft: str | None = None
    acceptance: float | None = None
    draft_acceptance: float | None = None
    budget: int = 4096
    gamma1: int | None = None
    gamma2: int | None = None
    tree: str = "chain"
    offload: str = "auto"
    resident_layers: int | None = None
    memory_gib: float | None = None
    temperature: float = 0.6

    def request(self) -> PlanInputs:
        memory = None if self.memory_gib is None else int(self.memory_gib * GIB)
        lengths: dict[str, Any] = {"budget": self.budget, "gamma1": self.gamma1, "gamma2": self.gamma2}
        return PlanInputs(
            self.model,
            dimensions(self.model),
            self.tokens,
            describe(_RTX_2080_TI if self.gpu == _RTX_2080_TI.name else profiles.load(self.gpu)),
            Placement(offload=self.offload, resident_layers=self.resident_layers, memory=memory),
            Speculation(self.method, self.draft or "lookup", tree=self.tree, **lengths),
            draft=None if self.draft is None else dimensions(self.draft),
            acceptance=self.acceptance,
            draft_acceptance=self.draft_acceptance,
        )


class Row(NamedTuple):
    """A set-up and its published values by measure: tbt_ms, speedup or tokens_per_verification."""

    what: str
    setup: Setup
    published: dict[str, float]


LEVEL_1 = 0.23  # of JackFram/llama-68m's tokens, in the authors' runs (A100_Ablation_graph_chain_retrieval.csv)
ON_CHIP = Setup("a100", "Llama-2-7B-128K", 122 * 1024, offload="none", budget=4096)
TRIFORCE = ON_CHIP._replace(
    method="triforce", draft="Llama-68M", gamma1=1, gamma2=6, acceptance=0.9234, draft_acceptance=LEVEL_1
)
NAIVE = ON_CHIP._replace(method="naive", draft="Llama-68M")
AT_0_6 = 0.9137  # acceptance at temperature 0.6 (table 2); none is published for the larger budgets of table 3


def temperature() -> Iterator[Row]:
    """Table 2: temperature, TriForce's speed-up and acceptance, and those of the naive policy."""
    yield Row("plain", ON_CHIP, {"tbt_ms": 54})  # a comment in the source of the project page, as the 24 ms are
    table = (
        (0.0, 2.31, 0.9234, 1.56, 0.4649),
        (0.2, 2.25, 0.9203, 1.54, 0.4452),
        (0.4, 2.20, 0.9142, 1.47, 0.4256),
        (0.6, 2.19, 0.9137, 1.42, 0.4036),
        (0.8, 2.08, 0.8986, 1.34, 0.3131),
        (1.0, 2.08, 0.9004, 1.29, 0.2872),
        (1.2, 2.02, 0.8902, 1.27, 0.2664),
    )
    for t, speedup, acceptance, naive_speedup, naive_acceptance in table:
        both = {"speedup": speedup} | ({"tbt_ms": 24} if t == 0 else {})
        yield Row(f"TriForce, T = {t:g}", TRIFORCE._replace(acceptance=acceptance, temperature=t), both)
        naive = NAIVE._replace(draft_acceptance=naive_acceptance, temperature=t)
        yield Row(f"naive policy, T = {t:g}", naive, {"speedup": naive_speedup})


def levels() -> Iterator[Row]:
    """Table 2's ablations at temperature 0.6."""
    alone = ON_CHIP._replace(method="retrieval", gamma2=6, acceptance=0.9126)
    yield Row("retrieval without hierarchy", alone, {"speedup": 1.80})
    yield Row("StreamingLLM with hierarchy", TRIFORCE._replace(acceptance=0.8745), {"speedup": 1.90})
    yield Row("both", TRIFORCE._replace(acceptance=AT_0_6), {"speedup": 2.19})


def off_chip() -> Iterator[Row]:
    """Table 3 with the README's settings: layers resident, budget, gamma. 127K tokens at temperature 0.6."""
    plain = ON_CHIP._replace(tokens=127 * 1024, offload="stream")
    two = TRIFORCE._replace(
        gpu="2x-rtx-4090", tokens=127 * 1024, offload="stream", budget=12288, gamma2=16, acceptance=AT_0_6
    )
    one = two._replace(gpu="rtx-4090", budget=8192, gamma2=12, resident_layers=0)
    table = (  # model, layers resident plainly and with TriForce (None: as many as fit), milliseconds a token
        ("Llama-2-7B-128K", 12, 9, 840, 108),
        ("LWM-Text-Chat-128K", 12, 9, 840, 114),
        ("Llama-2-13B-128K", None, None, 1794, 226),
    )
    for model, plain_layers, layers, plain_ms, triforce_ms in table:
        yield Row(
            f"{model}, 2 x RTX 4090, plain",
            plain._replace(gpu="2x-rtx-4090", model=model, resident_layers=plain_layers),
            {"tbt_ms": plain_ms},
        )
        triforce = two._replace(model=model, resident_layers=layers)
        yield Row(f"{model}, 2 x RTX 4090, TriForce", triforce, {"tbt_ms": triforce_ms})
    single = plain._replace(gpu="rtx-4090", resident_layers=0)
    yield Row("Llama-2-7B-128K, RTX 4090, plain", single, {"tbt_ms": 2434})  # the paper's own offloading (7.80x)
    yield Row("Llama-2-7B-128K, RTX 4090, DeepSpeed on the host", single._replace(offload="host"), {"tbt_ms": 1516})
    yield Row("Llama-2-7B-128K, RTX 4090, TriForce", one, {"tbt_ms": 312})
    yield Row("LWM-Text-Chat-128K, RTX 4090, TriForce", one._replace(model="LWM-Text-Chat-128K"), {"tbt_ms": 314})


TREE = Setup("rtx-4090", "Llama-2-70B", 512, "naive", "Llama-2-7B", tree="767")


def sequoia_page() -> Iterator[Row]:
    """Sequoia's project page: milliseconds a token of its own offloading and of its trees."""
    # It names neither trees nor temperatures: planned with 768 nodes and the nearest acceptance of a table, .855 of
    # Llama-2-70B for drafts of 7 billion weights, .705 of Vicuna-33B for those of one billion.
    table = (
        ("rtx-4090", "Llama-2-70B", "Llama-2-7B", 4540, 570),
        ("rtx-4090", "Vicuna-33B", "TinyLlama-1.1B", 1780, 350),
        ("rtx-4090", "Llama-2-22B", "TinyLlama-1.1B", 950, 170),
        ("rtx-4090", "InternLM-20B", "InternLM-7B", 770, 170),
        ("rtx-4090", "Llama-2-13B", "TinyLlama-1.1B", 270, 90),
        ("rtx-2080-ti", "Vicuna-33B", "TinyLlama-1.1B", 4810, 870),
        ("rtx-2080-ti", "Llama-2-22B", "TinyLlama-1.1B", 3040, 530),
        ("rtx-2080-ti", "Llama-2-13B", "TinyLlama-1.1B", 1530, 340),
    )
    for gpu, model, draft, plain_ms, tree_ms in table:
        yield Row(f"{model}, {gpu}, plain", Setup(gpu, model, 512), {"tbt_ms": plain_ms})
        rate = 0.705 if draft == "TinyLlama-1.1B" else 0.855
        setup = TREE._replace(gpu=gpu, model=model, draft=draft, draft_acceptance=rate)
        yield Row(f"{model} with {draft}, {gpu}, Sequoia", setup, {"tbt_ms": tree_ms})


def sequoia_l40() -> Iterator[Row]:
    """Table 2, weights in host memory, planned with the L40S's profile, whose memory and link are the same."""
    # No more memory is planned than a tree's caches and the draft model need: DeepSpeed's 5.7 s are those of all
    # weights over the link. The draft's acceptance follows from the tokens that the table gives for SpecInfer's trees.
    l40 = Setup("l40s", "Llama-2-70B", 512, memory_gib=8)
    yield Row("Llama-2-70B, L40, plain (DeepSpeed)", l40, {"tbt_ms": 5700})
    table = (
        ("Llama-2-70B", "Llama-2-7B", 0.0, 0.855, 20, 660, 10.3, 8.6),
        ("Llama-2-70B", "Llama-2-7B", 0.6, 0.835, 20, 680, 9.91, 8.4),
        ("Llama-3.1-70B", "Llama-3.1-8B", 0.0, 0.875, 24, 600, 11.68, 9.5),
        ("Llama-3.1-70B", "Llama-3.1-8B", 0.6, 0.865, 24, 610, 11.37, 9.3),
    )
    for model, draft, t, rate, gib, milliseconds, tokens, speedup in table:
        setup = TREE._replace(
            gpu="l40s", model=model, draft=draft, draft_acceptance=rate, memory_gib=gib, temperature=t
        )
        values = {"tbt_ms": milliseconds, "tokens_per_verification": tokens, "speedup": speedup}
        yield Row(f"{model} with {draft}, L40, T = {t:g}", setup, values)


# By text: at T = 0 and then at T = 0.6 acceptance, ms a token, tokens, speed-up, SpecInfer's with 5x8 (and with 8x8).
A100_TABLES = {
    ("Llama-2-7B", "Llama-68M", "127", 24.2): """
        C4:          0.715 6.0 5.08 4.04 3.45 3.70 | 0.585 7.6 3.92 3.18 2.47 2.42
        OpenWebText: 0.615 7.5 3.86 3.22 2.79      | 0.515 8.9 3.33 2.71 2.10
        CNN:         0.635 7.1 4.05 3.41 2.95      | 0.515 8.5 3.45 2.83 2.11
        MT-Bench:    0.725 6.0 4.98 4.03 3.84      | 0.585 7.6 3.96 3.18 2.45""",
    ("Llama-2-13B", "Llama-68M", "63", 31.2): """
        C4:          0.685 8.4 4.20 3.73 3.30 | 0.575  9.8 3.57 3.19 2.48
        OpenWebText: 0.605 9.8 3.49 3.18 2.77 | 0.495 11.3 3.06 2.77 2.17
        CNN:         0.625 9.4 3.68 3.33 2.95 | 0.515 10.8 3.17 2.88 2.17""",
    ("Vicuna-33B", "Sheared-LLaMA-1.3B", "63", 53.2): """
        C4:          0.705 23.4 4.28 2.27 1.83 | 0.665 24.3 4.16 2.19 1.64
        OpenWebText: 0.685 24.1 3.93 2.21 1.75 | 0.645 25.0 3.82 2.13 1.57
        CNN:         0.685 24.1 3.93 2.21 1.75 | 0.655 24.6 3.86 2.16 1.58""",
}


def sequoia_a100() -> Iterator[Row]:
    """Tables 1, 3, 5 and 6 on an A100, whose code runs Hugging Face's model; plain 13B and 33B: together.ai."""
    for (model, draft, nodes, plain_ms), table in A100_TABLES.items():
        yield Row(f"{model}, plain", Setup("a100", model, 256, tree=nodes), {"tbt_ms": plain_ms})
        for line in table.strip().splitlines():
            text, _, numbers = line.partition(":")
            for t, part in zip((0.0, 0.6), numbers.split("|"), strict=True):
                rate, ms, tokens, speedup, *specinfer = map(float, part.split())
                setup = TREE._replace(gpu="a100", model=model, draft=draft, tokens=256, tree=nodes, temperature=t)
                setup = setup._replace(draft_acceptance=rate)
                name = f"{model} with {draft}, {text.strip()}, T = {t:g}"
                yield Row(name, setup, {"tbt_ms": ms, "tokens_per_verification": tokens, "speedup": speedup})
                for first, value in zip((5, 8), specinfer, strict=False):
                    tree = setup._replace(tree=f"k-ary:{first}{'x1' * 7}")
                    yield Row(f"{name}, SpecInfer {first}x8", tree, {"speedup": value})


TABLES = {
    "temperature": temperature,
    "levels": levels,
    "off-chip": off_chip,
    "sequoia-page": sequoia_page,
    "sequoia-l40": sequoia_l40,
    "sequoia-a100": sequoia_a100,
}


plan_of = cache(lambda setup: make_plan(setup.request()))


def planned(setup: Setup) -> dict[str, float]:
    """Return the measures of a plan; none if it does not fit."""
    plan = plan_of(setup)
    return _measures(plan, plan.plain.tbt.seconds, plan.chosen.tbt.seconds) if plan.fits else {}


def by_authors(setup: Setup) -> dict[str, float]:
    """Return the measures that the papers' own code is expected to have in the same set-up."""
    plan = plan_of(setup)
    passes = Passes(plan.inputs, plan.placed)
    return _measures(plan, *(reference_token_s(passes, each) for each in (plan.plain, plan.chosen)))


def _measures(plan: Plan, plain_s: float, chosen_s: float) -> dict[str, float]:
    tokens = plan.chosen.tokens_per_verification
    return {"tbt_ms": 1000 * chosen_s, "speedup": plain_s / chosen_s, "tokens_per_verification": tokens}


# A layer's kernels in a CUDA graph, beside reading bytes: a pass over 8 rows and 4,096 tokens of Llama-2-7B takes
# 14.02 ms on an A100 (A100_llama_7B_128K_graph_turning_point.csv), of which reading at READ takes 8.84; 32 layers.
KERNELS_S = 162e-6
# A layer without a graph, by the host: 17.7 ms for 32 on an A100 (A100_Ablation_wo_chain.csv), 19.4 ms where layers are
# split between RTX 4090s (tp_4090.csv), 24.2 ms with Hugging Face's model (Sequoia, table 1).
EAGER_LAYER_S, SPLIT_LAYER_S, HUGGING_FACE_LAYER_S = 0.55e-3, 0.61e-3, 0.756e-3
DRAFT_LAYER_S = 0.25e-3  # of a draft model in a graph: .5 ms for the two of JackFram/llama-68m (Sequoia, table 1)
WAIT_S = SAMPLE_S["cuda"]  # drawing or comparing, and a value for which the host waits
ROUND_WAITS = 3  # of a round of the first level: for the draft's token, its comparison, the token after it


def reference_token_s(passes: Passes, decoding: Decoding) -> float:
    """Return the seconds a token that the papers' own code takes with the settings of a planned method.

    TriForce's waits for the host at each token of both levels, launches without CUDA graphs where it streams or is
    split, and always reads the retrieval cache with as many rows as a draft is long; Sequoia's verifies with Hugging
    Face's model. Times of the parts are the authors' own, most of them in the public repository
    ranonrkm/TriForce-legacy. None is fitted to a published speed-up.
    """
    request = passes.inputs
    wait = WAIT_S if request.hardware.gpus == 1 else WAIT_S + ALL_REDUCE_S  # each is broadcast
    gamma, gamma1, tokens = decoding.gamma2, decoding.gamma1, decoding.tokens_per_verification
    resources = passes.full(gamma + 1)[0].resources  # a layer is copied once the one before is launched
    verifying = max(
        resources["device memory"] + request.shape.layers * KERNELS_S, resources["link"] + _launching(passes)
    )
    if gamma == 0:
        drafting = 0.0
    elif _has_tree(passes):
        drafting, wait = decoding.depth * _draft(passes), 0.0
    elif METHODS[decoding.method].middle is None:
        drafting = gamma * (_draft(passes) + wait)
    elif gamma1 == 0:
        drafting = gamma * (_retrieval(passes, 1, graphed=False) + wait)
    else:
        graphed = request.hardware.gpus == 1 and passes.placed.resident_layers == request.shape.kv_layers
        each = gamma1 * _draft(passes) + _retrieval(passes, gamma + 1, graphed) + ROUND_WAITS * wait
        drafting = _rounds(draft_acceptance(request), gamma1, gamma) * each
    return (drafting + verifying) / tokens + wait  # accepted tokens are compared one by one


def _rounds(acceptance: float, gamma1: int, gamma2: int) -> float:
    """Return the expected rounds of the first level until `gamma2` tokens are drafted for the second.

    A round drafts `gamma1` tokens, each accepted at the rate, and emits one more than are accepted.
    """
    emitted = [acceptance**count * (1 - acceptance) for count in range(gamma1)] + [acceptance**gamma1]
    rounds = [0.0] * (gamma2 + gamma1 + 1)  # by tokens drafted so far; none are left from `gamma2` on
    for drafted in reversed(range(gamma2)):
        left = sum(chance * rounds[drafted + 1 + accepted] for accepted, chance in enumerate(emitted))
        rounds[drafted] = 1 + left
    return rounds[0]


def _retrieval(passes: Passes, rows: int, graphed: bool) -> float:
    """Return the seconds of a pass over the retrieval cache."""
    request = passes.inputs
    read = passes.linears(rows).weights + request.kv_bytes(request.budget) / request.hardware.gpus
    device = read / request.hardware.bandwidth / READ + passes.inputs.shape.layers * KERNELS_S
    return device if graphed else max(device, _launching(passes))


def _draft(passes: Passes) -> float:
    """Return the seconds of a step of the draft model: of its launches, or of a larger one's bytes; 0 for lookup."""
    draft = passes.inputs.draft
    return 0.0 if draft is None else max(draft.layers * DRAFT_LAYER_S, passes.draft_step() - passes.sample_s)


def _launching(passes: Passes) -> float:
    """Return the seconds in which the host launches a pass."""
    split = passes.inputs.hardware.gpus > 1
    layer = HUGGING_FACE_LAYER_S if _has_tree(passes) else SPLIT_LAYER_S if split else EAGER_LAYER_S
    return passes.inputs.shape.layers * layer


def _has_tree(passes: Passes) -> bool:
    return passes.inputs.speculation.tree != "chain"


def measured(setup: Setup, args: argparse.Namespace) -> dict[str, float]:
    """Return what `triforce bench` measures in a row's set-up here; nothing on another GPU, unless --model is given."""
    import torch

    names = [torch.cuda.get_device_name(i).lower() for i in range(torch.cuda.device_count())]
    words = setup.gpu.removeprefix("2x-").split("-")
    if args.model is None and not (names and all(all(word in name for word in words) for name in names)):
        return {}
    command = ["bench", "-f", args.measure, "--model", args.model or setup.model, "--methods", setup.method, "--json"]
    command += ["--context", args.context or str(setup.tokens), "--temperature", str(setup.temperature), "--quiet"]
    if args.model is None:
        names = ["draft", "offload", "budget", "gamma1", "gamma2", "resident_layers", "tree"]
        given = {name: getattr(setup, name) for name in names if getattr(setup, name) is not None}
        command += [word for name, value in given.items() for word in ("--set", f"{name}={value}")]
    done = subprocess.run([sys.executable, "-m", "triforce_cli", *command], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return {}
    row = json.loads(done.stdout)["rows"][-1]  # plain decoding is before it
    return {"tbt_ms": 1000 / row["tokens_per_s"]} | {key: row[key] for key in ("speedup", "tokens_per_verification")}


def lines_of(row: Row, args: argparse.Namespace) -> Iterator[str]:
    """Yield a line of the table for each published value of a row."""
    ours = planned(row.setup)
    has_code = row.setup.offload != "host"  # DeepSpeed's
    theirs = by_authors(row.setup) if has_code else {}
    here = measured(row.setup, args) if args.measure else {}
    for measure, value in row.published.items():
        unit = {"tbt_ms": "ms a token", "speedup": "speed-up", "tokens_per_verification": "tokens"}[measure]
        error = f"{ours[measure] / value - 1:+.0%}" if ours else ""
        cells = [f"{each[measure]:,.4g}" if measure in each else "-" for each in (ours, theirs, here)]
        yield f"{row.what:62} {unit:10} {value:>9,} {cells[0]:>9} {error:>6} {cells[1]:>14} {cells[2]:>9}"


def main() -> None:
    """Print the tables that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", help=f"all, or some of: {', '.join(TABLES)}")
    parser.add_argument("--measure", metavar="BOOK", help="measure too, on this text, what the machine can")
    parser.add_argument("--model", help="with --measure: measure with this model, whatever the machine")
    parser.add_argument("--context", help="with --measure: so many tokens of the text, not the paper's")
    args = parser.parse_args()
    if unknown := set(args.tables) - set(TABLES):
        parser.error(f"no table {', '.join(sorted(unknown))}; there are: {', '.join(TABLES)}")
    head = f"{'':62} {'':10} published   planned  error  authors' code  measured"
    for name in args.tables or TABLES:
        print(f"{name}: {TABLES[name].__doc__.splitlines()[0]}\n{head}")
        for row in TABLES[name]():
            for line in lines_of(row, args):
                print(line, flush=True)
        print()


if __name__ == "__main__":
    main()
