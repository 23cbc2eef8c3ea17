"""Load `triforce serve` on loopback: many clients at once, some of which go away in the middle of their answer.

    python scripts/bench_serve.py
    python scripts/bench_serve.py --model Llama-3.2-1B --requests 200 --clients 16 --rounds 3 --json out.json

Every answer, greedy, must be the text that `triforce generate` writes for the prompt, and what a client has seen before
it went must be its beginning. After each round nothing may run or wait, and the server's memory is printed: it must be
flat after the first round. Measured are the time to the first token and the tokens a second of all clients together.
Prompts are passages of a book, each asked for several times. Exit code 1 if an answer differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from bench_peers import machine

from offload.metrics import percentile

BOOK = Path(__file__).parents[1] / "examples" / "frankenstein.txt"
COMMAND = [sys.executable, "-m", "triforce_cli"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one request came to; times in seconds."""

    ttft_s: float
    characters: int
    tokens: int
    is_whole: bool
    is_right: bool


def passages(count: int, seed: int) -> list[str]:
    """Return passages of the book, of 200 to 2,000 characters, each with a question."""
    text, draw = BOOK.read_text("utf-8"), random.Random(seed)
    lengths = [draw.randrange(200, 2000) for _ in range(count)]
    starts = [draw.randrange(len(text) - 2000) for _ in range(count)]
    return [f"{text[at : at + size]}\n\nGo on." for at, size in zip(starts, lengths, strict=True)]


def expected_texts(model: str, prompts: list[str], new: int) -> list[str]:
    """Return the command line's answers."""
    with tempfile.TemporaryDirectory() as folder:
        lines = [json.dumps({"id": number, "prompt": prompt}) for number, prompt in enumerate(prompts)]
        (path := Path(folder) / "prompts.jsonl").write_text("\n".join(lines), "utf-8")
        options = ["--model", model, "--temperature", "0", "-n", str(new), "--parallel", "1", "--quiet"]
        command = [*COMMAND, "generate", "--batch", str(path), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    results = {each["id"]: each["text"] for each in map(json.loads, done.stdout.splitlines())}
    return [results[number] for number in range(len(prompts))]


def start_server(args: argparse.Namespace) -> tuple[subprocess.Popen, str]:
    """Return the server's process and its URL."""
    options = ["--model", args.model, "--port", "0", "--parallel", str(args.parallel), "--queue", str(args.queue)]
    server = subprocess.Popen([*COMMAND, "serve", *options, "--context", "4K"], stderr=subprocess.PIPE, text=True)
    for line in server.stderr:
        if found := re.search(r"http://[\d.:]+", line):
            return server, found[0]
    raise SystemExit(f"the server has ended with {server.wait()}")


async def ask(client: httpx.AsyncClient, prompt: str, expected: str, new: int, leave_after: int | None) -> Outcome:
    """Stream one answer, up to the end or to `leave_after` characters. Waits and asks again when the queue is full."""
    messages, options = [{"role": "user", "content": prompt}], {"include_usage": True}
    body = {"messages": messages, "temperature": 0, "max_tokens": new, "stream": True, "stream_options": options}
    started, first, text, tokens = time.perf_counter(), None, "", 0
    while True:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code == 429:
                await asyncio.sleep(int(response.headers["retry-after"]))
                continue
            response.raise_for_status()
            async for line in response.aiter_lines():
                event = json.loads(line[6:]) if line.startswith("data: {") else {}
                tokens = event.get("usage", {}).get("completion_tokens", tokens)
                for choice in event.get("choices", []):
                    text += choice["delta"].get("content", "")
                if text and first is None:
                    first = time.perf_counter()
                if leave_after is not None and len(text) >= leave_after:
                    break
        ended = time.perf_counter() if first is None else first
        is_whole = leave_after is None
        is_right = text == expected if is_whole else expected.startswith(text)
        return Outcome(ended - started, len(text), tokens, is_whole, is_right)


async def run_round(url: str, prompts: list[str], expected: list[str], args: argparse.Namespace, seed: int) -> dict:
    """Return the figures of one round of requests."""
    draw = random.Random(seed)
    wanted = [(draw.randrange(len(prompts)), draw.random() < args.leave, draw.random()) for _ in range(args.requests)]
    waiting, found = iter(wanted), []
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=httpx.Limits(max_connections=None)) as client:

        async def work() -> None:
            for number, leaves, share in waiting:
                text = expected[number]
                leave_after = int(share * len(text)) if leaves else None
                found.append(await ask(client, prompts[number], text, args.new, leave_after))

        started = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(args.clients)))
        seconds = time.perf_counter() - started
        state = await until_idle(client)
    whole = [each for each in found if each.is_whole]
    return {
        "requests": len(found),
        "left": len(found) - len(whole),
        "wrong": sum(not each.is_right for each in found),
        "ttft_median_s": statistics.median(each.ttft_s for each in found),
        "ttft_p95_s": percentile([each.ttft_s for each in found], 0.95),
        "tokens_per_s": sum(each.tokens for each in whole) / seconds,
        "seconds": seconds,
        **state,
    }


async def until_idle(client: httpx.AsyncClient) -> dict[str, Any]:
    """Return the server's memory and what it has counted, when nothing runs any more."""
    while True:
        lines = [line for line in (await client.get("/metrics")).text.splitlines() if not line.startswith("#")]
        values = {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}
        if not values["triforce_sequences_running"] and not values["triforce_sequences_waiting"]:
            names = {
                "cancelled": 'triforce_sequences_total{reason="cancelled"}',
                "rss": "triforce_resident_memory_bytes",
            }
            return {key: int(values.get(name, 0)) for key, name in names.items()}
        await asyncio.sleep(0.2)


def report(number: int, found: dict[str, Any]) -> str:
    """Return a round's figures in one line."""
    ttft = f"TTFT {found['ttft_median_s']:.2f} s, 95 % {found['ttft_p95_s']:.2f} s"
    counts = f"{found['requests']} requests, {found['left']} left, {found['wrong']} wrong"
    memory = f"memory {found['rss'] / 2**20:.0f} MiB, {found['cancelled']} cancelled so far"
    return f"round {number}: {counts}; {ttft}; {found['tokens_per_s']:.1f} tokens/s; {memory}"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=200, help="in each round")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=20, help="different ones")
    parser.add_argument("--new", type=int, default=48, help="tokens of an answer")
    parser.add_argument("--leave", type=float, default=0.25, help="share of the clients that go in the middle")
    parser.add_argument("--parallel", default="8")
    parser.add_argument("--queue", type=int, default=8)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    prompts = passages(args.prompts, seed=1)
    expected = expected_texts(args.model, prompts, args.new)
    server, url = start_server(args)
    rounds = []
    try:
        for number in range(args.rounds):
            rounds.append(found := asyncio.run(run_round(url, prompts, expected, args, seed=number)))
            print(report(number + 1, found), flush=True)
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(60)
    print(f"SIGTERM: exit code {code}; {machine()}")
    if args.json:
        facts = {"arguments": {key: str(value) for key, value in vars(args).items()}, "machine": machine()}
        args.json.write_text(json.dumps(facts | {"rounds": rounds}, indent=1) + "\n", "utf-8")
    sys.exit(any(found["wrong"] for found in rounds) or code)


if __name__ == "__main__":
    main()
