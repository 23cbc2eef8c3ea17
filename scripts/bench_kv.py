"""Compare quantised keys and values with bf16 ones: time of attention, and what the rounding does to a model's answers.

    python scripts/bench_kv.py attention --tokens 8192
    python scripts/bench_kv.py disk --tokens 8192 --disk /mnt/nvme
    python scripts/bench_kv.py quality --book shared/books/pg1342.txt --context 4096 --kv q8 q4

`attention`: of all layers over random keys and values, runs interleaved, medians. `disk`: a step of the model with all
keys and values in a file, likewise; a disk's rate may change from one second to the next. `quality`: for the last 512
tokens of a book, given the `--context` tokens before them: perplexity, the share of tokens at which the likeliest next
token is that of bf16, and the mean KL divergence from bf16. Threads are those of OMP_NUM_THREADS.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from bench_kernels import attention, fill, medians
from bench_peers import machine

from offload import EngineConfig, open_model
from offload.caches.full import FullCache
from offload.memory.tier_settings import TierSettings
from offload.memory.tiered_factory import TieredStoreFactory
from offload.model.decoder import Model
from offload.prompt_cache.fingerprint import TOKENS as PROMPT_BLOCK
from offload.settings.config import EXACT

SCORED = 512


def bench_attention(model: Model, kinds: list[str], tokens: int, rows: list[int], repeats: int) -> None:
    """Print milliseconds of attention in all layers for each format and number of query tokens."""
    caches = {}
    for kind in kinds:
        model.kv = kind
        caches[kind] = model.new_cache(tokens + max(rows))
        fill(caches[kind], tokens)
    print(f"{'tokens':>8}{'rows':>6}" + "".join(f"{kind:>10}" for kind in kinds) + "   ratios to the first")
    for count in rows:
        runs = {kind: attention(cache, count) for kind, cache in caches.items()}
        found = medians(runs, repeats, model.operations.kernel)
        ratios = " ".join(f"{found[kinds[0]] / found[kind]:.2f}" for kind in kinds[1:])
        print(
            f"{tokens:8}{count:6}" + "".join(f"{1e3 * found[kind]:7.1f} ms" for kind in kinds) + f"   {ratios}",
            flush=True,
        )


def bench_disk(model: Model, kinds: list[str], tokens: int, folder: Path, repeats: int) -> None:
    """Print milliseconds of a step with all keys and values on disk, and the bytes that it reads, for each format."""
    runs, links = {}, {}
    for kind in kinds:
        factory = TieredStoreFactory(model.operations, model.device, TierSettings(disk=folder), kv=kind)
        store = factory.new_store(model.shape, tokens + 1, model.dtype)
        cache, model.kv = model.new_cache(tokens + 1, store=store), kind
        source = model.new_cache(2 * PROMPT_BLOCK)
        fill(source, 2 * PROMPT_BLOCK)
        for start in range(0, tokens, PROMPT_BLOCK):
            at = min(start, PROMPT_BLOCK)
            cache.restore(PROMPT_BLOCK, source.store.dump(at, at + PROMPT_BLOCK))
        runs[kind], links[kind] = partial(_step, model, cache), factory.link
    before = {kind: link.statistics.bytes for kind, link in links.items()}
    found = medians(runs, repeats, model.operations.kernel)
    for kind in kinds:
        size = (links[kind].statistics.bytes - before[kind]) / (2 * (repeats + 1))
        print(f"{kind:6} {1e3 * found[kind]:7.1f} ms, {size / 1e6:.1f} MB", flush=True)


def _step(model: Model, cache: FullCache) -> None:
    model.forward(torch.tensor([5]), cache)
    cache.truncate(cache.length - 1)


@torch.inference_mode()
def log_probabilities(model: Model, kind: str, ids: list[int], chunk: int = 512) -> torch.Tensor:
    """Return the log-probabilities `[SCORED, vocab]` of what follows each of the last tokens, but for the very last."""
    model.kv = kind
    cache, rows = model.new_cache(len(ids)), []
    for start in range(0, len(ids), chunk):
        hidden = model.forward(torch.tensor(ids[start : start + chunk]), cache)
        if start + chunk > len(ids) - SCORED - 1:
            rows.append(hidden)
    return model.logits(torch.cat(rows)[-SCORED - 1 : -1]).float().log_softmax(-1)


def bench_quality(model: Model, kinds: list[str], ids: list[int]) -> None:
    """Print perplexity, agreement and divergence of each format."""
    exact, truth = log_probabilities(model, kinds[0], ids), torch.tensor(ids[-SCORED:])
    for kind in kinds:
        found = exact if kind == kinds[0] else log_probabilities(model, kind, ids)
        loss = -found.gather(1, truth[:, None]).mean().item()
        same = (found.argmax(-1) == exact.argmax(-1)).float().mean().item()
        divergence = (exact.exp() * (exact - found)).sum(-1).mean().item()
        print(f"{kind:6} perplexity {torch.tensor(loss).exp():.4f}, same {same:.2%}, KL {divergence:.2e}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["attention", "disk", "quality"])
    parser.add_argument("--kv", nargs="+", default=["q8", "q4", "fp8"])
    parser.add_argument("--model", default=EngineConfig().model)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--book", type=Path)
    parser.add_argument("--disk", type=Path, default=Path("."), help="a folder on the disk")
    parser.add_argument("--context", type=int, default=4096, help="tokens before the scored ones")
    options = parser.parse_args()
    opened = open_model(EngineConfig(options.model, "cpu"))
    model, kinds = opened.load().model, [EXACT, *options.kv]
    print(f"{machine()}, kernel {opened.kernel}")
    if options.what == "attention":
        bench_attention(model, kinds, options.tokens, options.rows, options.repeats)
    elif options.what == "disk":
        bench_disk(model, kinds, options.tokens, options.disk, options.repeats)
    else:
        ids = opened.tokenizer.encode(options.book.read_text("utf-8"), special_tokens=False)[
            -options.context - SCORED - 1 :
        ]
        bench_quality(model, kinds, ids)


if __name__ == "__main__":
    main()
