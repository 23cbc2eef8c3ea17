"""Draws a benchmark as a bar chart. matplotlib is an optional extra, imported only where a chart is asked for."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from offload.errors import SettingsError

from ..output.output_files import check_file, permissions_of, target_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_INSTALL = "install it in the folder of triforce: pip install '.[plot]'"


def check_plot(path: Path) -> None:
    """Raise SettingsError if no chart could be written there, before the benchmark runs."""
    if find_spec("matplotlib") is None:
        raise SettingsError("--plot needs matplotlib, which is not installed", _INSTALL)
    check_file(path, "--plot", "bench.png")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    kinds = sorted(FigureCanvasAgg.get_supported_filetypes())
    if path.suffix.lower().removeprefix(".") not in kinds:
        raise SettingsError(f"--plot cannot write {path.name}", f"end its name in one of: {', '.join(kinds)}")


def plot(path: Path, rates: Mapping[str, float], title: str) -> None:
    """Write a chart with a bar for each method's tokens per second; the file is replaced as a whole."""
    figure = new_figure((max(5.0, 1.2 * len(rates)), 4.5))
    axes = figure.add_subplot()
    bars = axes.bar(list(rates), list(rates.values()), color="#4477aa")
    axes.bar_label(bars, fmt="%.1f", padding=2)
    axes.margins(y=0.12)
    axes.set_ylabel("tokens per second")
    axes.set_title(title, fontsize=9, wrap=True)
    axes.spines[["top", "right"]].set_visible(False)
    write_figure(figure, path)


def new_figure(size: tuple[float, float]) -> Figure:
    """Return an empty figure of a size in inches."""
    from matplotlib.figure import Figure  # not pyplot, which would look for a screen

    return Figure(figsize=size, layout="constrained")


def write_figure(figure: Figure, path: Path) -> None:
    """Write a figure; the file, or that which a link leads to, is replaced as a whole."""
    target = target_of(path)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    os.close(handle)
    try:
        figure.savefig(name, dpi=150)
        os.chmod(name, permissions_of(target))
        os.replace(name, target)
    finally:
        Path(name).unlink(missing_ok=True)
