"""Measure the time to the first token of a second question on a document whose KV is on disk. Ratios from one process.

    python scripts/bench_prompts.py
    python scripts/bench_prompts.py --prompt-tokens 4000 --json out.json
    python scripts/bench_prompts.py --synthetic 31872

Each question is asked of a freshly loaded model: the first one prefills the document, the second restores it from disk,
and is asked once more without a cache, to compare the texts. With --synthetic, random KV is saved and restored without
a prefill, and the phases of restoring are timed alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
from bench_peers import machine

from offload import EngineConfig, GenerationConfig, Sampling, Speculation, Tokens, open_model
from offload.api.opened_model import OpenModel
from offload.events import Restored
from offload.prompt_cache.block import Buffer
from offload.prompt_cache.chain import Prompt
from offload.prompt_cache.fingerprint import TOKENS
from offload.prompt_cache.folder import PromptFolder
from offload.prompt_cache.prefill import PromptCache, SequencePrompts
from offload.prompt_cache.writer import BlockWriter
from offload.sequence import TokenSequence
from offload.speculation.passes.runner import Runner

ROOT = Path(__file__).parents[1]
QUESTIONS = ("Who writes the letters?", "Where does the writer want to travel, and why?")


def ask(opened: OpenModel, document: str, question: str, args: argparse.Namespace, prompts: PromptCache | None) -> dict:
    """Return the seconds to the first token, the tokens, and the Restored event if tokens came from disk."""
    engine = opened.load(prompts=prompts)
    ids = opened.tokenizer.chat(f"{document}\n\n{question}", None)
    out, first, read = [], None, None
    start = time.perf_counter()
    generation = GenerationConfig(max_new_tokens=args.new)
    for event in engine.generate(ids, Sampling(temperature=0), generation, Speculation(args.method)):
        if isinstance(event, Tokens) and event.ids:
            first = first or time.perf_counter() - start
            out += event.ids
        elif isinstance(event, Restored):
            read = event
    return {"ttft_s": first, "tokens": out, "prompt_tokens": len(ids), "read": read}


def measure(args: argparse.Namespace, folder: Path) -> dict:
    """Ask both questions with a prompt cache in `folder`, the second also without; return times and sizes."""
    opened = open_model(EngineConfig(model=args.model, device="cpu"))
    text = args.text.read_text("utf-8")
    start, end = opened.tokenizer.spans(text)[0][0], opened.tokenizer.spans(text)[args.prompt_tokens - 100][1]
    document = text[start:end]
    prompts = opened.prompt_cache(PromptFolder(folder), 0)
    first = ask(opened, document, QUESTIONS[0], args, prompts)
    second = [ask(opened, document, QUESTIONS[1], args, prompts) for _ in range(args.repeats)]
    without = ask(opened, document, QUESTIONS[1], args, None)
    read, ttft = second[0]["read"], statistics.median(run["ttft_s"] for run in second)
    return {
        "machine": machine(),
        "prompt_tokens": second[0]["prompt_tokens"],
        "first_ttft_s": first["ttft_s"],
        "second_ttft_s": ttft,
        "second_without_ttft_s": without["ttft_s"],
        "sooner": first["ttft_s"] / ttft,
        "restored_tokens": read.tokens,
        "restored_bytes": read.bytes,
        "restored_s": statistics.median(run["read"].seconds for run in second),
        "same": all(run["tokens"] == without["tokens"] for run in second),
    }


def synthetic(args: argparse.Namespace, folder: Path) -> dict:
    """Save and restore an entry of random KV; times in seconds, medians of the repeats."""
    opened = open_model(EngineConfig(model=args.model, device="cpu"))
    model, blocks = opened.load().model, args.synthetic // TOKENS
    ids = torch.randint(
        0, model.shape.vocab, (blocks * TOKENS + 1,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    prompts = opened.prompt_cache(PromptFolder(folder), 0)

    def runner() -> Runner:
        return Runner(model, model.new_cache(len(ids), model.rope(len(ids))))

    full = runner()
    prompt = Prompt(prompts.storage(full.model.kv), prompts.bind(full).fingerprint, ids)
    kv = full.cache.store.dump(0, TOKENS)
    kv.copy_(torch.randn(kv.shape))
    for index in range(blocks):
        full.restore(index * TOKENS, prompt.ids(index), kv + index)
    save_s = timed(lambda: save(prompt, full, blocks))
    phases = {"save_s": [save_s], "restore_s": [], "read_s": [], "load_s": [], "pack_s": []}
    rows, buffer = full.cache.store.export(0, TOKENS), Buffer()
    for _ in range(args.repeats):
        full = None  # free its memory first
        full = runner()
        phases["restore_s"].append(restore(prompts.bind(full), ids).seconds)
        full = None
        store = runner().cache.store
        phases["read_s"].append(timed(lambda: [prompt.read(index, buffer) for index in range(blocks)]))
        phases["load_s"].append(timed(lambda: [store.load(index * TOKENS, kv) for index in range(blocks)]))  # noqa: B023
        store = runner().cache.store
        phases["pack_s"].append(timed(lambda: [store.write(index * TOKENS, *rows) for index in range(blocks)]))  # noqa: B023
    size = blocks * kv.nbytes
    facts = {"machine": machine(), "tokens": blocks * TOKENS, "bytes": size}
    return facts | {name: statistics.median(each) for name, each in phases.items()}


def timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def save(prompt: Prompt, runner: Runner, blocks: int) -> None:
    writer = BlockWriter(prompt, runner)
    writer.save(blocks, runner.num_cached, 1e6)  # so slow a prefill that no disk is too slow
    writer.close()


def restore(prompts: SequencePrompts, ids: list[int]) -> Restored:
    """Restore a prompt; `seconds` of the result are those of the whole, with everything around reading."""
    start = time.perf_counter()
    with closing(prompts.prefill(TokenSequence(ids))) as events:
        event = next(event for event in events if isinstance(event, Restored))
    assert event.tokens == len(ids) - 1, "not everything was restored"
    return replace(event, seconds=time.perf_counter() - start)


def report_phases(found: dict) -> None:
    """Print the seconds of the phases of restoring."""
    before, after = found["read_s"] + found["pack_s"], found["restore_s"]
    print(found["machine"])
    print(f"{found['tokens']:,} tokens, {found['bytes'] / 1e6:.0f} MB, saved in {found['save_s']:.2f} s")
    print(f"one thread: reading {found['read_s']:.2f} s, copying {found['load_s']:.2f} s")
    print(f"            packing rows into blocks instead of copying blocks {found['pack_s']:.2f} s")
    print(
        f"restored    {after:.2f} s, {found['tokens'] / after:,.0f} tokens/s; {before / after:.1f} times the speed of"
    )
    print(f"            reading and packing one after the other, {before:.2f} s")


def report(found: dict) -> None:
    """Print the measurements."""
    first, second, without = (found[f"{name}_ttft_s"] for name in ("first", "second", "second_without"))
    megabytes, read = found["restored_bytes"] / 1e6, found["restored_s"]
    print(found["machine"])
    print(f"first question   {first:8.2f} s to the first token, {found['prompt_tokens']:,} prompt tokens")
    print(f"second, cached   {second:8.2f} s: {found['sooner']:.1f} times sooner")
    print(f"                 {found['restored_tokens']:,} tokens from disk, {megabytes:.0f} MB in {read:.2f} s")
    print(f"second, uncached {without:8.2f} s; the same text: {'yes' if found['same'] else 'NO'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--text", type=Path, default=ROOT / "examples" / "frankenstein.txt")
    parser.add_argument("--prompt-tokens", type=int, default=8000)
    parser.add_argument("--method", default="auto")
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--synthetic", type=int, metavar="TOKENS", help="random KV of so many tokens, without a prefill"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = (synthetic if args.synthetic else measure)(args, Path(folder))
    (report_phases if args.synthetic else report)(found)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if found.get("same", True) else 1


if __name__ == "__main__":
    sys.exit(main())
