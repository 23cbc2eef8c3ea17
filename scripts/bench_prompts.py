"""Measure the time to the first token of a second question on a document whose KV is on disk. Ratios from one process.

    python scripts/bench_prompts.py
    python scripts/bench_prompts.py --prompt-tokens 4000 --json out.json

Each question runs on a freshly loaded model. The first prefills the document, the second restores it from disk and then
runs once more without the cache, to compare the output.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bench_peers import machine

from offload import EngineConfig, GenerationConfig, Sampling, Speculation, Tokens, open_model
from offload.events import Restored
from offload.loader import OpenModel
from offload.prompt_cache.folder import PromptFolder
from offload.prompt_cache.prefill import PromptCache

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
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(args, Path(folder))
    report(found)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if found["same"] else 1


if __name__ == "__main__":
    sys.exit(main())
