"""Compare triforce with transformers and llama.cpp: same model, same prompt, same machine, one run.

    python scripts/bench_peers.py --prompt-tokens 8000 --dtype auto
    python scripts/bench_peers.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf    # llama.cpp too, by llama-cpp-python

Each contender prefills the same tokens and then decodes greedily, all in one process. Decode rounds are interleaved, so
that drift of the machine's speed affects all. Figures are medians. Ratios are ours / theirs: below 1, triforce is
faster. `pip install llama-cpp-python` for llama.cpp.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from offload import EngineConfig, open_model
from offload.loading.hub.download import open_checkpoint
from offload.sequence import TokenSequence
from offload.speculation.passes.runner import Runner
from triforce_cli.run.processor import processor

ROOT = Path(__file__).parents[1]


@dataclass
class Result:
    """The figures of one contender: seconds per prefill, and seconds per decoded token."""

    name: str
    prefill_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)

    @property
    def prefill(self) -> float:
        return statistics.median(self.prefill_s)

    @property
    def step(self) -> float:
        return statistics.median(self.step_s)


class Ours:
    """The engine of triforce, driven step by step."""

    def __init__(self, dtype: str, chunk: int) -> None:
        opened = open_model(EngineConfig(dtype=dtype, prefill_chunk=chunk))
        self.engine, self.tokenizer, self.path = opened.load(), opened.tokenizer, opened.checkpoint.path
        self.name = f"triforce ({self.engine.describe()})"
        self._chunk = chunk

    def prefill(self, ids: Sequence[int], room: int) -> None:
        model = self.engine.model
        self._sequence = TokenSequence(ids)
        self._runner = Runner(model, model.new_cache(len(ids) + room), self._chunk)
        for _ in self._runner.prefill(self._sequence):
            pass

    def step(self) -> None:
        logits = self.engine.model.logits(self._runner.rows(self._sequence))
        self._sequence.extend([int(logits.argmax())])


class Transformers:
    """AutoModelForCausalLM with its DynamicCache and sdpa attention."""

    def __init__(self, path: Path, dtype: str) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

        self.name = f"transformers ({dtype})"
        checkpoint, has_config = open_checkpoint(Path(path)), (Path(path) / "config.json").is_file()
        config = AutoConfig.from_pretrained(path) if has_config else LlamaConfig(**checkpoint.config)
        self._model = AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype)).eval()
        with checkpoint.opened() as weights:  # the embedded model's weights are quantised
            self._model.load_state_dict({name: weight.read() for name, weight in weights.items()}, strict=False)

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int], room: int) -> None:
        tokens = torch.tensor([ids])
        out = self._model(tokens, use_cache=True, logits_to_keep=1)
        self._cache, self._token = out.past_key_values, out.logits[:, -1:].argmax(-1)

    @torch.inference_mode()
    def step(self) -> None:
        out = self._model(self._token, past_key_values=self._cache, use_cache=True)
        self._token = out.logits[:, -1:].argmax(-1)


class LlamaCpp:
    """llama-cpp-python on a GGUF file, flash attention on."""

    def __init__(self, gguf: Path, context: int) -> None:
        from llama_cpp import Llama

        self.name = f"llama.cpp ({gguf.stem})"
        self._llama = Llama(
            str(gguf),
            n_ctx=context,
            n_threads=torch.get_num_threads(),
            flash_attn=True,
            logits_all=False,
            verbose=False,
        )

    def prefill(self, ids: Sequence[int], room: int) -> None:
        self._llama.reset()
        self._llama.eval(list(ids))

    def step(self) -> None:
        self._llama.eval([int(self._llama.sample(temp=0.0))])


def timed(action: Callable[[], None]) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measure(contenders: Sequence, ids: Sequence[int], tokens: int, rounds: int, repeats: int) -> list[Result]:
    """Prefill each `repeats` times; then decode `tokens` tokens in `rounds` interleaved rounds."""
    results = [Result(contender.name) for contender in contenders]
    for contender, result in zip(contenders, results, strict=True):
        for _ in range(repeats):
            result.prefill_s.append(timed(lambda c=contender: c.prefill(ids, tokens + 8)))
            print(f"{result.name}: prefill {result.prefill_s[-1]:.1f} s", file=sys.stderr)
        contender.step()  # warm-up
    for _ in range(rounds):
        for contender, result in zip(contenders, results, strict=True):
            result.step_s += [timed(contender.step) for _ in range(tokens // rounds)]
    return results


def table(results: Sequence[Result], prompt: int) -> str:
    """Format the results, ours first; `prompt` is the number of prompt tokens."""
    ours = results[0]
    best = min((peer.step for peer in results[1:] if peer.name.startswith("transformers")), default=None)
    width = max(len(row.name) for row in results)
    heads = f"{'prefill s':>10} {'tokens/s':>9} {'ms/token':>9} {'ours/theirs':>12} {'prefill':>8}"
    lines = [f"{'':{width}} {heads}"]
    for row in results:
        ratios = f"{ours.step / row.step:12.2f} {ours.prefill / row.prefill:8.2f}"
        figures = f"{row.prefill:10.1f} {prompt / row.prefill:9.0f} {row.step * 1e3:9.1f}"
        lines.append(f"{row.name:{width}} {figures} {ratios}")
    if best is not None:
        lines.append(f"time per token, ours / transformers' best dtype: {ours.step / best:.2f}")
    return "\n".join(lines)


def machine() -> str:
    """Return the processor, the number of threads, the vector instructions and the version of torch."""
    level = torch.backends.cpu.get_cpu_capability()
    name = processor(torch.device("cpu"))
    return f"{name}, {torch.get_num_threads()} threads, {level}, torch {torch.__version__}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-file", type=Path, default=ROOT / "examples" / "frankenstein.txt")
    parser.add_argument("--prompt-tokens", type=int, default=8000)
    parser.add_argument("--tokens", type=int, default=32, help="decoded per contender")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=1, help="prefills per contender")
    parser.add_argument("--dtype", default="auto", help="ours")
    parser.add_argument("--peer-dtypes", default="float32,bfloat16", help="transformers'")
    parser.add_argument("--prefill-chunk", type=int, default=EngineConfig().prefill_chunk)
    parser.add_argument("--gguf", type=Path, help="for llama.cpp, if llama-cpp-python is installed")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def main() -> None:
    options = parse()
    ours = Ours(options.dtype, options.prefill_chunk)
    ids = ours.tokenizer.encode(options.prompt_file.read_text("utf-8"), special_tokens=True)[: options.prompt_tokens]
    contenders = [ours, *(Transformers(ours.path, dtype) for dtype in options.peer_dtypes.split(",") if dtype)]
    if options.gguf:
        contenders.append(LlamaCpp(options.gguf, len(ids) + options.tokens + 16))
    results = measure(contenders, ids, options.tokens, options.rounds, options.repeats)
    print(f"{len(ids):,} prompt tokens; {machine()}\n{table(results, len(ids))}")
    if options.json:
        rows = [asdict(row) | {"prefill_median_s": row.prefill, "step_median_s": row.step} for row in results]
        options.json.write_text(
            json.dumps({"machine": machine(), "prompt_tokens": len(ids), "results": rows}, indent=2)
        )


if __name__ == "__main__":
    main()
