"""Measure the gain of more ranks with a streamed KV cache: each rank streams its own heads over its own link.

    python scripts/bench_parallel.py
    python scripts/bench_parallel.py --ranks 1 2 4 --bandwidth 0.05 --json out.json

The links are simulated, one for each rank, so this runs without a GPU; ranks communicate over gloo. The model is
seeded and has an even number of KV heads; its weights are small, so that the link is the bottleneck, as it is for a
large model on GPUs. All KV is streamed. Measured are plain decoding steps, and verifications of drafts from the
retrieval cache.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from bench_peers import machine
from transformers import LlamaConfig, LlamaForCausalLM

from offload import EngineConfig, GenerationConfig, Sampling, Speculated, Speculation, Tokens, open_model
from offload.engine import Engine
from offload.memory.factory import TieredStoreFactory
from offload.memory.link import SimulatedLink
from offload.memory.tier_settings import TierSettings
from offload.parallel import ALONE, Group
from offload.parallel.process_group import Ranks

FAST = 1e12  # bytes a second: no limit
GREEDY = Sampling(temperature=0)


def save_model(folder: str) -> None:
    """Save a narrow Llama of 8 layers with 8 heads and 4 KV heads."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def measure(group: Group, folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return for each method the tokens, the seconds per verification, and the bytes a second over this rank's link."""
    opened = open_model(EngineConfig(model=folder, device="cpu"), group=group)
    loaded = opened.load()
    link = SimulatedLink(FAST)
    stores = TieredStoreFactory(loaded.model.operations, loaded.model.device, TierSettings("stream"), link)
    engine = Engine(loaded.model, (), 512, stores=stores)
    prompt = torch.randint(3, 1024, (args.prompt_tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    decode(engine, prompt, "ar", 2)  # prefills the prompt
    link.bandwidth = args.bandwidth * 1e9
    found = {}
    for method in ("ar", "retrieval"):
        before, start = link.statistics.bytes, time.perf_counter()
        tokens, each = decode(engine, prompt, method, args.new)
        found[method] = {"s": each, "tokens": tokens}
        found[method]["bytes_per_s"] = (link.statistics.bytes - before) / (time.perf_counter() - start)
    return found


def decode(engine: Engine, prompt: list[int], method: str, new: int) -> tuple[list[int], float]:
    """Return the tokens, and the median seconds of a verification by the full cache (plain: of a step)."""
    wanted = Speculation(method, "none", budget=256, chunk=16, gamma2=4)
    tokens, times, done = [], [], 0.0
    for event in engine.generate(prompt, GREEDY, GenerationConfig(max_new_tokens=new), wanted):
        if isinstance(event, Tokens):
            tokens += event.ids
        elif isinstance(event, Speculated):
            total = sum(level.verify_s for level in event.levels if level.verifier == "full")
            times.append(total - done)
            done = total
    return tokens, statistics.median(times[1:] or times)  # the first event comes before any pass


def serve(pipe: Any, rank: int, size: int, meeting: str, folder: str, args: argparse.Namespace) -> None:
    """Run one rank in this process and send its measurements to the parent."""
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(size)})
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    group = Ranks(torch.device("cpu"), folder=Path(meeting)) if size > 1 else ALONE
    pipe.send(measure(group, folder, args))
    pipe.recv()  # wait until every rank is done
    os._exit(0)


def run(size: int, folder: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Start `size` ranks and return the measurements of each."""
    context, pipes = multiprocessing.get_context("spawn"), []
    (Path(folder) / str(size)).mkdir()  # where they meet
    for rank in range(size):
        ours, theirs = context.Pipe()
        arguments = theirs, rank, size, f"{folder}/{size}", folder, args
        context.Process(target=serve, args=arguments, daemon=True).start()
        pipes.append(ours)
    found = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send(None)
    return found


def combine(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the measurements of all ranks as one: the first rank's seconds and tokens, and the sum of the rates."""
    rows = {}
    for method, own in found[0].items():
        assert all(each[method]["tokens"] == own["tokens"] for each in found), "the ranks emitted different tokens"
        rows[method] = own | {"bytes_per_s": sum(each[method]["bytes_per_s"] for each in found)}
    return rows


def report(size: int, rows: dict[str, Any], base_size: int, base_rows: dict[str, Any]) -> None:
    """Print the measurements of `size` ranks beside those of `base_size` ranks."""
    for method, row in rows.items():
        base = base_rows[method]
        same = "the same tokens" if row["tokens"] == base["tokens"] else "other tokens"
        print(
            f"  {size} ranks, {method:9} {1e3 * row['s']:6.0f} ms a verification, {row['bytes_per_s'] / 1e9:.3f} GB/s: "
            f"{base['s'] / row['s']:.2f} and {row['bytes_per_s'] / base['bytes_per_s']:.2f} of {base_size}, {same}",
            flush=True,
        )


def main() -> int:
    """Run, tell, and write the JSON file if one is wanted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--prompt-tokens", type=int, default=8000)
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--bandwidth", type=float, default=0.05, help="GB/s of each link")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"{args.prompt_tokens:,} tokens, {args.bandwidth} GB/s for each rank; {machine()}", flush=True)
    rows: dict[int, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        for size in args.ranks:
            rows[size] = combine(run(size, folder, args))
            report(size, rows[size], args.ranks[0], rows[args.ranks[0]])
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), **vars(args), "ranks": rows}, indent=1, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main())
