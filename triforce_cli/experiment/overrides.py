"""What `triforce experiment` is asked to run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offload.errors import SettingsError

from ..options.command_request import Request
from ..options.settings import resolve
from .definition import Experiment
from .grid import Grid


@dataclass(frozen=True, slots=True)
class ExperimentRequest:
    """An experiment and how to run it.

    Args:
        flags: settings of the command line and the environment by name; `origins` says which of the two gave each.
            Those of the command line override the experiment's, and that the environment's.
        profile: the hardware profile; `plan_for` is the one to plan for, if not the published one.
        data: a data set, in place of the files.
        files: the texts, each a source of prompts; empty for the book that comes with the repository.
        command: the command line, for the report.
    """

    experiment: Experiment
    flags: Mapping[str, Any]
    origins: Mapping[str, str]
    profile: str | None
    home: Path | None
    plan_for: str | None = None
    quick: bool = False
    dry_run: bool = False
    files: Sequence[Path | str] = ()
    points: Path | None = None
    output: Path | None = None
    plot: Path | None = None
    quiet: bool = False
    extend_context: bool = False
    command: str = ""
    json: bool = False
    data: str | None = None

    @property
    def measures(self) -> bool:
        """Return whether anything is measured, and not all planned."""
        return not self.dry_run and self.experiment.bench is not None

    @property
    def grid(self) -> Grid:
        """Return what is to be measured, where anything is."""
        return self.experiment.grid(self.quick)

    @property
    def other_model(self) -> bool:
        """Return whether the command line names another model, draft or quantisation than the experiment measures."""
        if not self.measures:
            return False
        own = self.grid.flags
        return any(name in self.given and self.given[name] != own.get(name) for name in ("model", "draft", "quantize"))

    @property
    def given(self) -> dict[str, Any]:
        """Return the settings of the command line."""
        return {name: value for name, value in self.flags.items() if self.origins.get(name) == "flag"}

    def request(self, own: Mapping[str, Any], more: Mapping[str, Any] | None = None) -> Request:
        """Return the request of a run with the experiment's `own` settings, and `more` in place of some of them.

        Raises SettingsError, also for a setting of the command line that the experiment varies.
        """
        more = more or {}
        if taken := [name for name in more if name in self.given]:
            option = f"--{taken[0].replace('_', '-')}"
            raise SettingsError(f"{option} is varied by {self.experiment.name}", f"leave {option} out")
        flags = {"method": "auto", **self.flags, **own, **self.given, **more}
        named = dict.fromkeys((*own, *more), f"experiment {self.experiment.name}")
        origins = dict(self.origins) | named | dict.fromkeys(self.given, "flag")
        settings = resolve(flags, origins, self.profile)
        if "seed" not in settings.values:  # with one drawn at random, no run could be found again
            settings = replace(settings, generation=replace(settings.generation, seed=0))
        return Request(settings, self.home, "experiment", extend_context=self.extend_context)
