"""Measure how often the full cache accepts tokens of the same model on a small cache, by method, budget and chunk.

    python scripts/bench_acceptance.py --task continue --temperature 0
    python scripts/bench_acceptance.py --task summarise --temperature 1 --prompt-file pride-and-prejudice.txt
    python scripts/bench_acceptance.py --kernel off --mean-keys 16,8 --chunks 8,16,32
    python scripts/bench_acceptance.py --task read --temperature 1 --middles plane,q4 --dtype bfloat16

The model decodes plainly on the full cache (p), or reads on in the book (`read`). At every token each other cache
computes its distribution (q) of the same token. The acceptance is sum(min(p, q)): the expected rate of speculative
sampling, free of sampling noise. `--middles` are those that read all tokens. A prompt beyond the model's context
extends it.
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
from offload.caches import selection
from offload.caches.chunk_scores import KeptMeanKeys, LayerScores
from offload.caches.factory import selected_cache
from offload.caches.full import FullCache
from offload.caches.selected import SelectedCache
from offload.caches.selection import RetrievalSelector
from offload.kernels.native.structs import BLOCK
from offload.sequence import TokenSequence
from offload.settings.config import EXACT, KERNELS
from offload.speculation.passes.runner import Runner
from offload.speculation.passes.selected_runner import SelectedRunner
from offload.speculation.sampling.warp import Sampler, sample

ROOT = Path(__file__).parents[1]
SCORES = {16: KeptMeanKeys, 8: partial(LayerScores, resident=0)}  # by the bits of mean keys; a CPU's own are 16
AT_ONCE = 128 * BLOCK  # tokens that are copied together from one full cache to another
QUESTION = "Summarize the book above in detail, with the main characters and events."


def prompt(tokenizer, options: argparse.Namespace) -> list[int]:
    """Return the first `prompt_tokens` of the book, with what is read on, or the book and a question (`summarise`)."""
    ids = tokenizer.encode(options.prompt_file.read_text("utf-8"), special_tokens=True)
    if options.task != "summarise":
        return ids[: options.prompt_tokens + (options.new if options.task == "read" else 0)]
    return tokenizer.chat(f"{tokenizer.decode(ids[: options.prompt_tokens - 60])}\n\n{QUESTION}", None)


def new_cache(full: FullCache, settings: Speculation, bits: int) -> SelectedCache:
    """Return a small cache whose chunks are selected by mean keys of so many bits."""
    with patch.object(selection, "RetrievalSelector", partial(RetrievalSelector, scores=SCORES[bits])):
        return selected_cache(full, settings)


def full_caches(model, sequence: TokenSequence, kinds: set[str], room: int) -> dict[str, Runner]:
    """Return a full cache of the sequence in each format that changes no bit; one has run it."""
    fulls, whole = {}, (len(sequence) - 1) // BLOCK * BLOCK
    for kind in sorted(kinds):
        model.kv = kind
        full = fulls[kind] = Runner(model, model.new_cache(len(sequence) + room))
        first = next(iter(fulls.values()))
        for start in range(0, whole if full is not first else 0, AT_ONCE):
            end = min(start + AT_ONCE, whole)
            full.restore(start, sequence.tokens[start:end], first.cache.dump(start, end))
        list(full.prefill(sequence))
    return fulls


@torch.inference_mode()
def measure(
    model, ids: list[int], settings: list[tuple[Speculation, int]], options: argparse.Namespace
) -> list[list[tuple[float, bool]]]:
    """Return, for each setting and bits of mean keys, the acceptance at each new token, and whether the best agree."""
    prompt, read = (ids[: -options.new], ids[-options.new :]) if options.task == "read" else (ids, [])
    kinds = ["packed" if each.middle == "plane" else EXACT for each, _ in settings]
    sequence, rates = TokenSequence(prompt), [[] for _ in settings]
    fulls = full_caches(model, sequence, {*kinds}, options.new)
    middles = [
        SelectedRunner(fulls[kind], new_cache(fulls[kind].cache, *each))
        for kind, each in zip(kinds, settings, strict=True)
    ]
    sampler = Sampler(Sampling(temperature=options.temperature, top_p=1), options.seed, model.shape.vocab, model.device)
    for at in range(options.new):
        (p, *_), others = (
            [sampler.distribution(model.logits(each.rows(sequence)), sequence.tentative)[0] for each in runners]
            for runners in (fulls.values(), middles)
        )
        for rate, middle, q in zip(rates, middles, others, strict=True):
            rate.append((float(torch.minimum(p, q).sum()), bool(p.argmax() == q.argmax())))
            middle.observe(1, rate[-1][0])
        sequence.extend([read[at] if read else sample(p, sampler.generator)])
        sequence.commit()
    return rates


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-file", type=Path, default=ROOT / "examples" / "frankenstein.txt")
    parser.add_argument("--prompt-tokens", type=int, default=8000)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--task", choices=("continue", "read", "summarise"), default="continue")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budgets", default="512,1024,4096")
    parser.add_argument("--chunks", default="8,16")
    parser.add_argument("--middles", default="", help="plane, q4, or both, beside the selections by budget")
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
    settings += [(Speculation("retrieval", middle=name), 16) for name in filter(None, options.middles.split(","))]
    opened = opened.stretched(len(ids) + options.new)
    rates = measure(opened.load().model, ids, settings, options)
    print(f"{len(ids):,} prompt tokens, {options.new} new, temperature {options.temperature:g}; {machine()}")
    results = []
    for (each, kept), rate in zip(settings, rates, strict=True):
        mean, agreement = (sum(numbers) / len(rate) for numbers in zip(*rate, strict=True))
        where = {"method": each.middle or each.method, "budget": each.budget, "chunk": each.chunk}
        results.append(where | {"mean_key_bits": kept, "acceptance": mean, "agreement": agreement})
        size = f"budget {each.budget:5}  chunk {each.chunk:3}  mean keys {kept:2} bits" if each.budget else "all tokens"
        print(f"{where['method']:10} {size:44}  acceptance {mean:.3f}  greedy agreement {agreement:.3f}")
    if options.json:
        facts = {"machine": machine(), "task": options.task, "temperature": options.temperature}
        facts |= {"prompt": options.prompt_file.name, "prompt_tokens": len(ids), "new_tokens": options.new}
        options.json.write_text(json.dumps(facts | {"results": results}, indent=2))


if __name__ == "__main__":
    main()
