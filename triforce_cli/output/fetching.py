"""The progress bar while a model is fetched; nothing where stderr is no terminal."""

from __future__ import annotations

from types import TracebackType

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from .terminal import Terminal


class FetchBar:
    """A context manager whose value is called with what is being done, units done and units in all."""

    def __init__(self, terminal: Terminal, shown: bool = True) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        self._progress = Progress(
            *columns, console=terminal.console(), transient=True, disable=not (shown and terminal.shows_progress)
        )
        self._tasks: dict[str, int] = {}

    def __enter__(self) -> FetchBar:
        return self

    def __call__(self, what: str, done: int, total: int) -> None:
        if what not in self._tasks:
            self._progress.start()  # only now: a model that is there already needs no bar
            self._tasks[what] = self._progress.add_task(what, total=total)
        self._progress.update(self._tasks[what], completed=done)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()
