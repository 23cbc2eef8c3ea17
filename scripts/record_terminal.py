"""Record a command in a pseudo-terminal and draw the screen as an SVG picture. Needs the extra `pictures` (pyte).

    python scripts/record_terminal.py docs/images/terminal.svg
    python scripts/record_terminal.py bench.svg --columns 100 -- triforce bench -f book.txt --new 32
    python scripts/record_terminal.py bar.svg --at 2.5 -- triforce generate -f book.txt "Who writes?"

The command really runs; `triforce` is the one of this checkout. The picture shows the command and the screen at its
end, or `--at` seconds after its start. It uses no script, font or link, so that code hosts show it.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from xml.sax.saxutils import escape

import pyte

ROOT = Path(__file__).parents[1]
DEFAULT = ("triforce", "summarize", "examples/frankenstein-opening.txt", "--length", "short", "--seed", "1")
CELL, LINE, PAD, BAR = 8.4, 19, 16, 30  # pixels: width and height of a cell, margin, title bar
BACKGROUND, FOREGROUND = "#161b22", "#e6edf3"
COLOURS = {
    "black": "#6e7681",
    "red": "#ff7b72",
    "green": "#56d364",
    "brown": "#e3b341",
    "yellow": "#e3b341",
    "blue": "#79c0ff",
    "magenta": "#d2a8ff",
    "cyan": "#56d4dd",
    "white": "#e6edf3",
}


def record(command: Sequence[str], columns: int, rows: int, at: float | None = None) -> pyte.Screen:
    """Run a command in a pseudo-terminal; return the screen at its end, or after `at` seconds."""
    screen = pyte.Screen(columns, rows)
    stream = pyte.ByteStream(screen)
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    python = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
    # No prompt cache: a picture must not depend on what ran before.
    environment |= {"TERM": "xterm-256color", "PYTHONPATH": python, "TRIFORCE_CACHE": "0"}
    argv = [sys.executable, "-m", "triforce_cli", *command[1:]] if command[0] == "triforce" else list(command)
    process = subprocess.Popen(
        argv, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True, close_fds=True
    )
    os.close(slave)
    for chunk in _output(master, None if at is None else time.monotonic() + at):
        stream.feed(chunk)
    if process.poll() is None and at is not None:
        os.killpg(process.pid, signal.SIGTERM)  # SIGINT is ignored below a shell's background job
    os.close(master)
    process.wait(timeout=30)
    return screen


def _output(master: int, deadline: float | None) -> Iterator[bytes]:
    """Yield what the command writes, until it ends or the deadline passes."""
    while deadline is None or time.monotonic() < deadline:
        if not select.select([master], [], [], 0.05)[0]:
            continue
        try:
            chunk = os.read(master, 65536)
        except OSError:  # Linux: every writer has closed the terminal
            return
        if not chunk:
            return
        yield chunk


def draw(screen: pyte.Screen, command: Sequence[str]) -> str:
    """Return an SVG of the command and the screen, without trailing blank rows."""
    cells = [[screen.buffer[row][column] for column in range(screen.columns)] for row in range(screen.lines)]
    while cells and not any(cell.data.strip() for cell in cells[-1]):
        cells.pop()
    prompt = f"$ {shlex.join(command)}"
    heads = [prompt[start : start + screen.columns] for start in range(0, len(prompt), screen.columns)]
    width = round(screen.columns * CELL + 2 * PAD)
    height = round(BAR + 2 * PAD + (len(heads) + len(cells)) * LINE)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"',
        ' font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,DejaVu Sans Mono,monospace" font-size="14">',
        f"<title>{escape(prompt)}</title>",
        f'<rect width="{width}" height="{height}" rx="10" fill="{BACKGROUND}" stroke="#6e7681"/>',
        *(f'<circle cx="{20 + 20 * i}" cy="19" r="6" fill="{fill}"/>' for i, fill in enumerate(DOTS)),
    ]
    for number, head in enumerate(heads):
        lines.append(_text(head, 0, number, COLOURS["green"], True))
    for number, row in enumerate(cells, len(heads)):
        lines += _row(row, number)
    return "\n".join([*lines, "</svg>", ""])


DOTS = ("#ff5f57", "#febc2e", "#28c840")


def _row(cells: Sequence[pyte.screens.Char], number: int) -> Iterator[str]:
    """Yield one text element for each run of cells of the same style, and a rectangle behind a coloured background."""
    column = 0
    for (fg, bg, bold, reverse), run in groupby(cells, key=lambda cell: (cell.fg, cell.bg, cell.bold, cell.reverse)):
        text = "".join(cell.data for cell in run)
        fill, back = _colour(fg, FOREGROUND), _colour(bg, "")
        if reverse:
            fill, back = back or BACKGROUND, fill
        if back:
            x, y = PAD + column * CELL, BAR + PAD + number * LINE - 2
            yield f'<rect x="{x:.1f}" y="{y}" width="{len(text) * CELL:.1f}" height="{LINE}" fill="{back}"/>'
        lead = len(text) - len(text.lstrip())
        if text.strip():
            yield _text(text.strip(), column + lead, number, fill, bold)
        column += len(text)


def _text(text: str, column: int, number: int, fill: str, bold: bool) -> str:
    """Return a text element of exactly as many cells as characters, whatever the font."""
    x, y = PAD + column * CELL, BAR + PAD + number * LINE + 13
    weight = ' font-weight="bold"' if bold else ""
    length = f'textLength="{len(text) * CELL:.1f}" lengthAdjust="spacingAndGlyphs"'
    return f'<text x="{x:.1f}" y="{y}" fill="{fill}"{weight} {length} xml:space="preserve">{escape(text)}</text>'


def _colour(name: str, default: str) -> str:
    """Return the hex colour of a pyte colour: a name, six hex digits or `default`."""
    if name == "default":
        return default
    return COLOURS.get(name.removeprefix("bright"), f"#{name}" if len(name) == 6 else default)


def main() -> int:
    """Record, and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.epilog = f"Command, after --; default: {shlex.join(DEFAULT)}"
    parser.add_argument("output", type=Path, metavar="FILE.svg")
    parser.add_argument("--columns", type=int, default=80)
    parser.add_argument("--rows", type=int, default=40, help="rows of the terminal; blank ones at the end are cut off")
    parser.add_argument("--at", type=float, metavar="SECONDS", help="take the screen then, and interrupt the command")
    own = sys.argv[1:]
    command: Sequence[str] = DEFAULT
    if "--" in own:  # what follows is the command's, options included
        own, command = own[: own.index("--")], own[own.index("--") + 1 :]
    args = parser.parse_args(own)
    screen = record(command, args.columns, args.rows, args.at)
    args.output.write_text(draw(screen, command), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
