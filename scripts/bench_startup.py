"""Measure what `triforce generate "hi" -n 1` takes from the start of its process to the end, and in which phases.

Every round runs `python -c "import torch"`, the command itself, an instrumented run of it, and a command that is
refused for a missing file, in turn; medians are printed, and ratios within the same rounds.

    python scripts/bench_startup.py --rounds 5
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

COMMAND = ["generate", "hi", "-n", "1"]
MISSING = ["generate", "--prompt-file", "no-such-file.txt", "hi"]
PHASES = ("python", "command line", "torch", "engine", "config", "tokenizer", "weights", "first token", "other", "exit")


def instrumented() -> None:
    """Run the command in this process and print the seconds of each phase, and the clock's time at the end, as JSON."""
    started, first_line = float(os.environ["BENCH_STARTED"]), time.time()
    seconds = dict.fromkeys(PHASES, 0.0)
    seconds["python"] = first_line - started

    def timed(phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **values: Any) -> Any:
            begin = time.time()
            try:
                return call(*args, **values)
            finally:
                seconds[phase] += time.time() - begin

        return wrapper

    def imports(phase: str, *modules: str) -> None:
        for module in modules:
            timed(phase, __import__)(module)

    imports("command line", "triforce_cli.entry", "triforce_cli.app")
    imports("torch", "torch")
    imports("engine", "triforce_cli.run.run")
    from offload.api.opened_model import OpenModel
    from offload.engine import Engine
    from offload.events import Tokens
    from offload.loading.formats.gguf import GGUFCheckpoint
    from offload.loading.formats.safetensors import FolderCheckpoint
    from offload.loading.tokenizers.tokenizer import Tokenizer
    from triforce_cli.app import run, settle_libraries

    for kind in (FolderCheckpoint, GGUFCheckpoint):
        kind.__init__ = timed("config", kind.__init__)
        kind.load_tokenizer = timed("tokenizer", kind.load_tokenizer)
    Tokenizer.chat = timed("tokenizer", Tokenizer.chat)
    OpenModel.load = timed("weights", OpenModel.load)
    generate = Engine.generate

    def until_first_token(*args: Any, **values: Any) -> Any:
        begin = time.time()
        for event in generate(*args, **values):
            if isinstance(event, Tokens) and not seconds["first token"]:
                seconds["first token"] = time.time() - begin
            yield event

    Engine.generate = until_first_token
    settle_libraries()
    code = run(COMMAND)
    ended = time.time()
    seconds["other"] = ended - started - sum(seconds.values())
    print(json.dumps({"ended": ended, "seconds": seconds}), file=sys.stderr)
    sys.modules["triforce_cli.entry"].exit_without_teardown(code)


def run_timed(arguments: list[str], expected: int = 0) -> tuple[float, str, float]:
    """Run Python with arguments; return its seconds, what it wrote to stderr, and the clock's time at its end."""
    started = time.time()
    environment = os.environ | {"BENCH_STARTED": repr(started)}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment
    )
    ended = time.time()
    if done.returncode != expected:
        sys.exit(f"python {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr}")
    return ended - started, done.stderr, ended


def one_round() -> dict[str, float]:
    """Return the seconds of each command and phase, run once."""
    found = {"import torch": run_timed(["-c", "import torch"])[0]}
    found["generate"] = run_timed(["-m", "triforce_cli", *COMMAND])[0]
    found["missing file"] = run_timed(["-m", "triforce_cli", *MISSING], expected=2)[0]
    found["pull"] = run_timed(["-m", "triforce_cli", "pull"])[0]
    _, printed, ended = run_timed([__file__, "--instrumented"])
    report = json.loads(printed.strip().splitlines()[-1])
    phases = report["seconds"] | {"exit": ended - report["ended"]}
    return found | {f"  {name}": phases[name] for name in PHASES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--instrumented", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.instrumented:
        instrumented()
        return
    one_round()  # files into the page cache
    rounds = [one_round() for _ in range(args.rounds)]
    print(f"medians of {args.rounds} rounds, in seconds")
    for name in rounds[0]:
        values = [each[name] for each in rounds]
        ratio = statistics.median(each[name] / each["import torch"] for each in rounds)
        spread = f"{min(values):.2f} to {max(values):.2f}"
        print(f"{name:<16}{statistics.median(values):6.2f}  {spread:<14}{ratio:6.2f} x import torch")
    extra = statistics.median(each["generate"] - each["import torch"] for each in rounds)
    print(f"generate takes {extra:.2f} s more than import torch")


if __name__ == "__main__":
    main()
