"""Measure how much a model repeats itself, by sampling settings: the share of repeated 8-grams in its outputs.

Every text is summarized and continued with each setting. A prompt is prefilled once; the settings reuse its KV cache.

    python scripts/bench_repetition.py book.txt other.txt --settings "temperature=0" "temperature=0 dry_multiplier=0.8"
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from offload import EngineConfig, GenerationConfig, Sampling, Speculation, Tokens, open_model
from offload.api.opened_model import OpenModel
from offload.engine import Engine

QUESTION = "Summarize the text above in a few sentences."
GRAM = 8
SETTINGS = (
    "temperature=0",
    "temperature=0.6",
    "temperature=0 repetition_penalty=1.1",
    "temperature=0.3 repetition_penalty=1.1",
    "temperature=0 dry_multiplier=0.8",
    "temperature=0.3 dry_multiplier=0.8",
    "temperature=0.6 dry_multiplier=0.8",
    "temperature=0.3 repetition_penalty=1.05 dry_multiplier=0.8",
    "temperature=0.3 frequency_penalty=0.3 presence_penalty=0.3",
    "temperature=0.3 no_repeat_ngram=6",
)


def repeated_share(ids: Sequence[int], size: int = GRAM) -> float:
    """Return the share of n-grams that occurred before in `ids`; 0 for fewer than two n-grams."""
    grams = [tuple(ids[start : start + size]) for start in range(len(ids) - size + 1)]
    return 1 - len(set(grams)) / len(grams) if len(grams) > 1 else 0.0


def parse_sampling(text: str) -> Sampling:
    """Return the settings in "name=value name=value"; the others have triforce's defaults."""
    values = dict(each.split("=", 1) for each in text.split())
    return replace(Sampling(), **{name: json.loads(value) for name, value in values.items()})


def prompts(opened: OpenModel, text: str, tokens: int) -> Iterator[tuple[str, list[int]]]:
    """Yield each task's name and its prompt over the first `tokens` of a text."""
    ids = opened.tokenizer.encode(text, special_tokens=False)[:tokens]
    yield "summarize", opened.tokenizer.chat(f"{opened.tokenizer.decode(ids)}\n\n{QUESTION}", None)
    yield "continue", ids


def generate(engine: Engine, ids: list[int], sampling: Sampling, new: int) -> list[int]:
    """Return up to `new` tokens after `ids`."""
    config = GenerationConfig(max_new_tokens=new, seed=0)
    events = engine.generate(ids, sampling, config, Speculation("ar"))
    return [token for event in events if isinstance(event, Tokens) for token in event.ids]


def measure(opened: OpenModel, options: argparse.Namespace) -> dict[str, list[tuple[str, int, float]]]:
    """Return task, tokens and repeated share of every output, by setting; write the outputs to the given file."""
    engine, rows = opened.load(), {text: [] for text in options.settings}
    for path in options.texts:
        for task, ids in prompts(opened, path.read_text("utf-8", errors="replace"), options.context):
            for text, row in rows.items():
                emitted = generate(engine, ids, parse_sampling(text), options.new)
                row.append((task, len(emitted), repeated_share(emitted)))
                if options.out is not None:
                    with options.out.open("a", encoding="utf-8") as file:
                        print(f"== {path.stem}, {task}, {text}: {row[-1][2]:.0%}", file=file)
                        print(opened.tokenizer.decode(emitted), end="\n\n", file=file)
    return rows


def show(rows: dict[str, list[tuple[str, int, float]]]) -> None:
    """Print the mean shares of each setting, its worst output, and the tokens generated."""
    width = max(map(len, rows))
    print(f"{f'repeated {GRAM}-grams':{width}}  summarize  continue     all  worst  tokens")
    for text, row in rows.items():
        shares, tokens = [share for *_, share in row], sum(count for _, count, _ in row)
        of_task = [[share for each, _, share in row if each == task] for task in ("summarize", "continue")]
        summarize, continue_, both = (statistics.mean(each) for each in (*of_task, shares))
        print(f"{text:{width}}  {summarize:9.1%} {continue_:9.1%} {both:7.1%} {max(shares):6.0%} {tokens:7,}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--model", default=EngineConfig().model)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), metavar="NAME=VALUE ...")
    parser.add_argument("--context", type=int, default=2000, help="tokens of each text")
    parser.add_argument("--new", type=int, default=200, help="tokens to generate")
    parser.add_argument("--out", type=Path, help="append the outputs to this file")
    options = parser.parse_args()
    show(measure(open_model(EngineConfig(model=options.model)), options))


if __name__ == "__main__":
    main()
