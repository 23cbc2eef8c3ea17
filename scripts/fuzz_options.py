#!/usr/bin/env python3
"""Test random combinations of options: the greedy text must always be that of `--method ar --no-cache`.

    python scripts/fuzz_options.py                              40 combinations with the embedded model
    python scripts/fuzz_options.py --runs 300 --seed 7          others, and more of them
    python scripts/fuzz_options.py --seed 7 --only 41          one of them again

Each combination runs in this process and is compared with plain decoding of the same prompt by the same kernel in the
same dtype. A refusal (exit code 2 with a hint) is not a failure, but is counted. The exit code is 1 if any text
differs, if a run fails, or if most combinations were refused.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

BOOK = Path(__file__).parents[1] / "examples" / "frankenstein.txt"
LENGTHS = (40, 700, 2500, 5000)  # characters of a prompt: from one block to several pages
METHODS = ("auto", "ar", "lookup", "retrieval", "triforce", "streaming", "naive")
TREE_SAMPLINGS = ("without-replacement", "with-replacement", "top-k")


@dataclass(frozen=True)
class Combination:
    """A prompt and its options: `fixed` ones also apply to the reference, `free` ones must not change the text."""

    prompt: str
    fixed: tuple[str, ...]
    free: tuple[str, ...]

    def arguments(self, model: str) -> list[str]:
        return ["generate", "--model", model, "--device", "cpu", "--temperature", "0", *self.fixed, *self.free]

    def reference(self, model: str) -> list[str]:
        plain = Combination(self.prompt, self.fixed, ("--method", "ar", "--no-cache"))
        return plain.arguments(model)


class Outcome(NamedTuple):
    """Exit code, text, stderr and duration of a run."""

    code: int
    text: str
    stderr: str
    seconds: float


def draw(
    rng: random.Random, book: str, draft: str, levels: Sequence[str], lengths: Sequence[int] = LENGTHS
) -> Combination:
    """Draw a combination of all options that affect decoding; each is left out about half of the time."""

    def maybe(name: str, *values: object) -> list[str]:
        return [name, str(rng.choice(values))] if rng.random() < 0.5 else []

    length = rng.choice(lengths)
    start = rng.randrange(max(1, len(book) - length))
    kernel = rng.choice((*levels, "off"))
    # Torch rounds a row differently in batches of different sizes; only in fp32 are ties too rare to matter.
    dtype = "float32" if kernel == "off" else rng.choice(("float32", "bfloat16"))
    fixed = ["--kernel", kernel, "--dtype", dtype, "-n", str(rng.choice((1, 2, 9, 24, 40)))]
    fixed += maybe("--repetition-penalty", 1.1, 1.5) + maybe("--stop", "\n\n", "the", ", ")
    fixed += rng.choice((["--raw"], [], ["--system", "Be brief."]))
    method = rng.choice(METHODS)
    free = ["--method", method, *_placement(rng)]
    free += ["--draft", draft] if method == "naive" else maybe("--draft", "lookup", "none", draft)
    free += maybe("--gamma1", 1, 2, 5) + maybe("--gamma2", 1, 3, 8, 16) + maybe("--rebuild-every", 1, 7, 64)
    free += (
        maybe("--middle", "retrieval", "streaming", "h2o")
        + maybe("--budget", 256, 512, 1024)
        + maybe("--chunk", 4, 8, 16, 64)
    )
    free += maybe("--sink", 0, 1, 4, 16) + maybe("--window", 16, 64, 500)
    free += maybe("--tree", 1, 9, 64, "auto", "chain", "k-ary:2x3x1") + maybe("--tree-sampling", *TREE_SAMPLINGS)
    free += maybe("--prefill-chunk", 1 + rng.randrange(700)) + maybe("--threads", 1, 2, 3)
    free += maybe("--seed", 1, 2) + rng.choice(([], ["--cache"], ["--no-cache"]))
    free += rng.choice(([], [], ["--quiet"], ["--verbose"]))
    free += [flag for flag in ("--json", "--verify") if rng.random() < 0.25]
    return Combination(book[start : start + length], tuple(fixed), tuple(free))


def _placement(rng: random.Random) -> list[str]:
    if rng.random() < 0.5:
        return rng.choice(([], ["--offload", "none"], ["--offload", "auto"]))
    mode = rng.choice(("stream", "host", "hybrid"))
    placement = ["--offload", mode, "--link", str(rng.choice((1, 4, 50)))]
    if rng.random() < 0.5:
        placement += ["--resident-layers", str(rng.choice((0, 1, 2)))]
    if mode == "hybrid" and rng.random() < 0.5:
        placement += ["--host-share", str(rng.choice((0, 0.3, 1)))]
    return placement


def execute(arguments: Sequence[str], prompt: str) -> Outcome:
    """Run a command line in this process with the prompt on standard input."""
    import torch

    from triforce_cli.app import run

    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    stdin = io.TextIOWrapper(io.BytesIO(prompt.encode("utf-8")), encoding="utf-8")
    threads, begun = torch.get_num_threads(), time.perf_counter()
    with patch.multiple(sys, stdout=out, stderr=err, stdin=stdin):
        code = run(list(arguments))
        out.flush()
        err.flush()
    torch.set_num_threads(threads)
    written, said = (stream.buffer.getvalue().decode("utf-8") for stream in (out, err))
    return Outcome(code, _text(written, "--json" in arguments), said, time.perf_counter() - begun)


def _text(written: str, is_json: bool) -> str:
    """Return the generated text, without the newline that ends a text on stdout."""
    if not is_json:
        return written.rstrip("\n")
    events = map(json.loads, written.splitlines())
    return "".join(event["text"] for event in events if event["type"] == "text").rstrip("\n")


class Fuzzer:
    """Compares combinations of options with plain decoding."""

    def __init__(self, model: str, draft: str, seed: int, book: str, lengths: Sequence[int] = LENGTHS) -> None:
        from offload.api.diagnosis import kernel_state

        self._model, self._draft, self._seed = model, draft, seed
        self._book, self._lengths = book, lengths
        self._levels = kernel_state("auto").levels

    def combination(self, number: int) -> Combination:
        rng = random.Random(f"{self._seed}-{number}")
        return draw(rng, self._book, self._draft, self._levels, self._lengths)

    def check(self, number: int) -> tuple[str, str]:
        """Run a combination; return (outcome, remark), where outcome is equal, differs, failed or refused."""
        combination = self.combination(number)
        arguments = combination.arguments(self._model)
        found = execute(arguments, combination.prompt)
        if found.code == 2 and "hint: " in found.stderr:
            return "refused", found.stderr.strip().splitlines()[-2]
        if found.code != 0:
            return "failed", f"{shlex.join(arguments)}\n{found.stderr.strip()}"
        expected = execute(combination.reference(self._model), combination.prompt)
        if expected.code != 0 or found.text != expected.text:
            return "differs", f"{shlex.join(arguments)}\nfound    {found.text!r}\nexpected {expected.text!r}"
        return "equal", f"{found.seconds:.1f} s: {shlex.join(combination.fixed + combination.free)}"

    def run(self, numbers: Sequence[int]) -> Iterator[tuple[int, str, str]]:
        for number in numbers:
            yield number, *self.check(number)


def passed(outcomes: Counter[str]) -> bool:
    """Return whether nothing differed or failed, and more were equal than refused."""
    return not outcomes["differs"] and not outcomes["failed"] and outcomes["equal"] > outcomes["refused"]


@contextmanager
def isolated_home() -> Iterator[None]:
    """Use a temporary cache folder and no settings from the environment."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TRIFORCE_")}
    with tempfile.TemporaryDirectory() as home, patch.dict(os.environ, clean, clear=True):
        os.environ |= {"TRIFORCE_HOME": home, "TRIFORCE_CONFIG": home}
        yield


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="the model; a folder or a name")
    parser.add_argument("--draft", help="a draft model, also for `naive`; default: the model itself")
    parser.add_argument("--prompt-file", type=Path, default=BOOK, help="a text from which prompts are cut")
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="this combination alone")
    asked = parser.parse_args()
    from offload.loading.hub.download import locate
    from triforce_cli.app import settle_libraries

    settle_libraries()
    model = str(locate(asked.model))
    draft = str(locate(asked.draft)) if asked.draft else model
    fuzzer = Fuzzer(model, draft, asked.seed, asked.prompt_file.read_text("utf-8"))
    outcomes: Counter[str] = Counter()
    with isolated_home():
        for number, outcome, remark in fuzzer.run([asked.only] if asked.only is not None else range(asked.runs)):
            outcomes[outcome] += 1
            print(f"{number:4} {outcome:8} {remark}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()))
    return 0 if passed(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
