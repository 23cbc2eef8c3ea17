"""The progress bar while a model is fetched; nothing where stderr is no terminal."""

from __future__ import annotations

from types import TracebackType

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from .terminal import Terminal


class DownloadBar:
    """A context manager, called with a description of each file or step, units done and units in all."""

    def __init__(self, terminal: Terminal, shown: bool = True) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(
            *columns, console=terminal.console(), transient=True, disable=not (shown and terminal.shows_progress)
        )
        self._terminal = terminal
        self._tasks: dict[str, int] = {}

    def __enter__(self) -> DownloadBar:
        return self

    def __call__(self, description: str, done: int, total: int) -> None:
        if description not in self._tasks:
            if not self._tasks and self._terminal.before_line is not None:
                self._terminal.before_line()  # erases the spinner
            self._progress.start()  # only now: a model that is already on disk needs no bar
            self._tasks[description] = self._progress.add_task(description, total=total)
        self._progress.update(self._tasks[description], completed=done)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()
