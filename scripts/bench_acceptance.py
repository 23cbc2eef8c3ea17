"""Measure how often the full cache accepts tokens of the same model on a small cache, by method, budget and chunk.

    python scripts/bench_acceptance.py --task continue --temperature 0
    python scripts/bench_acceptance.py --task summarise --temperature 1 --prompt-file pride-and-prejudice.txt
    python scripts/bench_acceptance.py --kernel off --mean-keys 16,8 --chunks 8,16,32

The model decodes plainly on the full cache (p). At every token each small cache computes its distribution (q) of the
same token. The acceptance is sum(min(p, q)): the expected rate of speculative sampling, free of sampling noise.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from bench_peers import machine

from offload import EngineConfig, Sampling, Speculation, open_model
from offload.caches.chunk_scores import KeptMeanKeys, LayerScores
from offload.caches.full import FullCache
from offload.caches.selected import SelectedCache
from offload.caches.selection import RetrievalSelector
from offload.sequence import TokenSequence
from offload.settings.config import KERNELS
from offload.speculation.levels import hierarchy
from offload.speculation.passes.runner import Runner, SelectedRunner
from offload.speculation.sampling.warp import Sampler, sample

ROOT = Path(__file__).parents[1]
SCORES = {16: KeptMeanKeys, 8: partial(LayerScores, resident=0)}  # by the bits of mean keys; a CPU's own are 16
QUESTION = "Summarize the book above in detail, with the main characters and events."


def prompt(tokenizer, options: argparse.Namespace) -> list[int]:
    """Return the first `prompt_tokens` of the book (`continue`), or the book and a question (`summarise`)."""
    ids = tokenizer.encode(options.prompt_file.read_text("utf-8"), special_tokens=True)
    if options.task == "continue":
        return ids[: options.prompt_tokens]
    return tokenizer.chat(f"{tokenizer.decode(ids[: options.prompt_tokens - 60])}\n\n{QUESTION}", None)


def new_cache(full: FullCache, settings: Speculation, bits: int) -> SelectedCache:
    """Return a small cache whose chunks are selected by mean keys of so many bits."""
    with patch.object(hierarchy, "RetrievalSelector", partial(RetrievalSelector, scores=SCORES[bits])):
        return hierarchy.selected_cache(full, settings)


@torch.inference_mode()
def measure(
    model, ids: list[int], settings: list[tuple[Speculation, int]], options: argparse.Namespace
) -> list[list[float]]:
    """Return, for each setting and bits of mean keys, the acceptance at each new token."""
    full = Runner(model, model.new_cache(len(ids) + options.new))
    middles = [SelectedRunner(full, new_cache(full.cache, *each)) for each in settings]
    sampler = Sampler(Sampling(temperature=options.temperature, top_p=1), options.seed, model.shape.vocab, model.device)
    sequence, rates = TokenSequence(ids), [[] for _ in settings]
    list(full.prefill(sequence))
    for _ in range(options.new):
        p, *others = (
            sampler.distribution(model.logits(each.rows(sequence)), sequence.tentative)[0] for each in (full, *middles)
        )
        for rate, middle, q in zip(rates, middles, others, strict=True):
            rate.append(float(torch.minimum(p, q).sum()))
            middle.observe(1, rate[-1])
        sequence.extend([sample(p, sampler.generator)])
        sequence.commit()
    return rates


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-file", type=Path, default=ROOT / "examples" / "frankenstein.txt")
    parser.add_argument("--prompt-tokens", type=int, default=8000)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--task", choices=("continue", "summarise"), default="continue")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budgets", default="512,1024,4096")
    parser.add_argument("--chunks", default="8,16")
    parser.add_argument("--mean-keys", default="16", metavar="BITS", help="16 (more exactly the dtype's), 8 or both")
    parser.add_argument("--kernel", choices=KERNELS, default="auto", help="its blocks of 16 tokens are the least chunk")
    parser.add_argument("--model", default=EngineConfig().model)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def main() -> None:
    options = parse()
    opened = open_model(EngineConfig(model=options.model, dtype=options.dtype, kernel=options.kernel))
    ids = prompt(opened.tokenizer, options)
    budgets, chunks, bits = (
        [int(n) for n in text.split(",")] for text in (options.budgets, options.chunks, options.mean_keys)
    )
    settings = [
        (Speculation("retrieval", budget=budget, chunk=chunk), kept)
        for kept in bits
        for chunk in chunks
        for budget in budgets
    ]
    settings += [(Speculation("streaming", budget=budget), 16) for budget in budgets]
    rates = measure(opened.load().model, ids, settings, options)
    print(f"{len(ids):,} prompt tokens, {options.new} new, temperature {options.temperature:g}; {machine()}")
    results = []
    for (each, kept), rate in zip(settings, rates, strict=True):
        mean = sum(rate) / len(rate)
        where = {"method": each.method, "budget": each.budget, "chunk": each.chunk, "mean_key_bits": kept}
        results.append(where | {"acceptance": mean})
        text = f"{each.method:10} budget {each.budget:5}  chunk {each.chunk:3}  mean keys {kept:2} bits"
        print(f"{text}  acceptance {mean:.3f}")
    if options.json:
        facts = {"machine": machine(), "task": options.task, "temperature": options.temperature}
        facts |= {"prompt": options.prompt_file.name, "prompt_tokens": len(ids), "new_tokens": options.new}
        options.json.write_text(json.dumps(facts | {"results": results}, indent=2))


if __name__ == "__main__":
    main()
