"""The diagrams of the documentation: levels of speculation, tiers and their time line, packages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from triforce_cli.output.svg import BLUE, GREEN, GREY, ORANGE, PURPLE, Picture

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Level:
    """A level of speculation: its lines of text, its colour, the cells that it attends to, and its output."""

    lines: tuple[str, str, str, str]
    colour: str
    read: set[int]
    output: str


CELLS = 40
ENDS = {0, *range(CELLS - 3, CELLS)}  # the sink and the most recent tokens
LEVELS = (
    Level(
        ("Drafter", "n-gram lookup, or a draft model", "microseconds, or about 1 ms a token", ""),
        GREEN,
        ENDS,
        "γ1 tokens, drawn from q",
    ),
    Level(
        (
            "The model on the retrieval cache",
            "sink, best chunks, recent tokens: a few percent",
            "verifies what the drafter proposed, and drafts itself",
            "keeps x with min(1, p̂(x) / q(x)), else draws from max(p̂ − q, 0)",
        ),
        ORANGE,
        ENDS | {7, 8, 16, 17, 25, 30, 31},
        "γ2 tokens, distributed exactly as p̂",
    ),
    Level(
        (
            "The model on the full KV cache",
            "expensive: all keys and values are read",
            "verifies many tokens in one pass",
            "keeps x with min(1, p(x) / p̂(x)), else draws from max(p − p̂, 0)",
        ),
        BLUE,
        set(range(CELLS)),
        "tokens distributed exactly as p",
    ),
)


def hierarchy() -> Picture:
    """Draw the three levels, what part of the sequence each attends to, and what each passes on."""
    picture = Picture("The levels of hierarchical speculative decoding", 780, 470)
    for number, level in enumerate(LEVELS):
        _level(picture, 24 + number * 134, level)
    picture.text(392, 49, "tokens that it attends to (a draft model)", 11, "muted")
    picture.text(40, 452, "your text, with the distribution of the model alone", 15, "bold")
    return picture


def _level(picture: Picture, y: float, level: Level) -> None:
    picture.box(24, y, 732, 92, level.colour, 0.1)
    styles = ((25, 15, "bold"), (46, 13, ""), (64, 12, "muted"), (82, 11, "mono muted"))
    for text, (offset, size, kind) in zip(level.lines, styles, strict=True):
        if text:
            picture.text(40, y + offset, text, size, kind)
    for cell in range(CELLS):
        colour, fill = (level.colour, 0.75) if cell in level.read else (GREY, 0)
        picture.box(392 + cell * 8.8, y + 32, 6.4, 22, colour, fill)
    picture.arrow(200, y + 94, 200, y + 130)
    picture.text(214, y + 117, level.output, 12)


def tiers() -> Picture:
    """Draw where the KV of layers lies, and the time line of one pass."""
    picture = Picture("Tiers of an offloaded KV cache, and the time line of a pass", 780, 516)
    picture.text(24, 32, "Where keys and values lie", 15, "bold")
    _resident(picture)
    _pages(picture)
    picture.text(24, 300, "One pass over an offloaded layer and the next", 15, "bold")
    _time_line(picture)
    return picture


def _resident(picture: Picture) -> None:
    picture.text(24, 62, "GPU memory", 12, "muted")
    picture.box(24, 72, 350, 46, BLUE)
    picture.text(36, 100, "layers 0 to 7: resident, all of their KV")
    picture.box(386, 72, 220, 46, PURPLE)
    picture.text(398, 92, "staging ring")
    picture.text(398, 109, "pages on their way through", 11, "muted")
    picture.box(618, 72, 138, 46, BLUE)
    picture.text(630, 92, "newest page")
    picture.text(630, 109, "of every layer", 11, "muted")


def _pages(picture: Picture) -> None:
    picture.text(24, 164, "host memory, pinned: layers 8 to 31 in pages of 512 or 1,024 tokens", 12, "muted")
    for page in range(12):
        colour, kind = (PURPLE, "streamed") if page < 7 else (ORANGE, "host")
        picture.box(24 + page * 61, 174, 55, 46, colour)
        picture.text(51.5 + page * 61, 202, f"page {page}", 11, "", "middle")
        if page in (3, 9):
            text = (
                "streamed: over the link, attended to on the GPU" if kind == "streamed" else "attended to on the host"
            )
            picture.text(51.5 + page * 61, 240, text, 12, "muted", "middle")
    picture.arrow(496, 170, 496, 124)
    picture.text(504, 148, "the link: PCIe or NVLink", 11, "muted")


def _time_line(picture: Picture) -> None:
    lanes = (("link", PURPLE), ("GPU", BLUE), ("host CPU", ORANGE))
    for number, (name, _) in enumerate(lanes):
        picture.text(24, 341 + number * 44, name, 12, "muted")
        picture.grid(100, 358 + number * 44, 756, 358 + number * 44)
    for copied, attended in ((100, 140), (382, 445)):  # where the link and the others begin with a layer
        for page in range(7):
            _slot(picture, copied + page * 40, 0, 38, PURPLE, str(page))
            _slot(picture, attended + page * 40, 1, 34, BLUE, str(page))
        _slot(picture, attended, 2, 274, ORANGE, "pages 7 to 11")
        _slot(picture, attended + 277, 1, 20, GREEN, "")
    for y, text in zip((478, 496), TIME_LINE, strict=True):
        picture.text(24, y, text, 12, "muted")


TIME_LINE = (
    "The link prefetches while GPU and host compute, also the pages of the next layer. Green: partial results",
    "are merged by their log-sum-exp, which is exact. The split is adapted so that all end together.",
)


def _slot(picture: Picture, x: float, lane: int, width: float, colour: str, label: str) -> None:
    picture.box(x, 322 + lane * 44, width, 28, colour, 0.3)
    picture.text(x + width / 2, 341 + lane * 44, label, 11, "", "middle")


PURPOSE = {
    "commands": "one file per command: options in, exit code out",
    "experiment": "published values beside planned and measured ones",
    "summarize": "map-reduce",
    "bench": "methods compared",
    "run": "generate, verify, plan, calibrate",
    "options": "flag > environment > profile > default",
    "distributed": "start ranks, or be one",
    "input": "files, pipes, encodings, PDF and EPUB → text",
    "output": "terminal, progress, renderers, tables",
    "api": "open a model, ask it; diagnosis",
    "engine": "tokens in, events out",
    "session": "caches kept from prompt to prompt",
    "prompt_cache": "prompts' KV on disk",
    "planning": "bytes and seconds before anything is loaded",
    "speculation": "levels, drafters",
    "loading": "hub, formats, tokenizers",
    "weight_offloading": "streamed layers, host experts",
    "model": "one forward pass",
    "parallel": "ranks",
    "hardware": "profiles, rates",
    "caches": "which tokens: full, retrieval, window",
    "memory": "where they lie: stores, tiers, link",
    "kernels": "attention, merge, linears; native C",
    "architecture": "config, RoPE, YaRN, known models",
    "settings": "what users choose; methods",
    "system": "memory, files, child processes",
}


def layers(container: str) -> list[list[str]]:
    """Return the layers of a package from the import contracts in pyproject.toml, highest first."""
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    listed = re.search(rf'containers = \["{container}"\].*?layers = \[(.*?)\n\]', text, re.DOTALL)[1]
    return [row.split(" | ") for row in re.findall(r'"(.*?)"', listed)]


def packages() -> Picture:
    """Draw the packages of the command line and of the library, each layer above those that it may import."""
    columns = [
        (name, colour, [row for row in layers(name) if any(part in PURPOSE for part in row)])
        for name, colour in (("triforce_cli", GREEN), ("offload", BLUE))
    ]
    height = 92 + 34 * max(len(rows) for _, _, rows in columns)
    picture = Picture("The packages: each imports only what is below it", 900, height)
    for number, (name, colour, rows) in enumerate(columns):
        left = 24 + number * 436
        picture.text(left, 34, f"{name}/", 16, "bold mono")
        picture.text(left + 150, 34, ("terminal, environment, exit codes", "library: no terminal")[number], 12, "muted")
        for index, row in enumerate(rows):
            _layer(picture, left, 48 + 34 * index, [part for part in row if part in PURPOSE], colour)
    rule = "Each layer imports only layers below it; triforce_cli imports offload, never the other way. "
    picture.text(24, height - 16, f"{rule}lint-imports checks both.", 12, "muted")
    return picture


def _layer(picture: Picture, left: float, y: float, names: list[str], colour: str) -> None:
    """Draw the packages of one layer; two beside each other do not import each other."""
    width = (416 - 6 * (len(names) - 1)) / len(names)
    for index, name in enumerate(names):
        x = left + index * (width + 6)
        picture.box(x, y, width, 28, colour)
        picture.text(x + 8, y + 19, name, 12, "bold mono")
        column = 106 if len(names) == 1 else 16 + 7.6 * len(name)
        picture.text(x + column, y + 19, PURPOSE[name], 12 if len(names) == 1 else 11)
