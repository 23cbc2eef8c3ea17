"""`bench --quality`: modes that change the answer against exact decoding, by the last tokens of a text."""

from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from rich.text import Text

from offload.api.opened_model import OpenModel
from offload.engine import Engine
from offload.errors import PromptError, SettingsError
from offload.evaluation.teacher_forcing import TextScores, mean_divergence, perplexity, score_text, top1_agreement
from offload.events import Prefilled
from offload.metrics import Meter
from offload.settings.config import Sampling
from offload.settings.method_sizes import stored_tokens
from offload.units import counted

from ..options.request import Request
from ..options.settings import Settings
from ..output.format import milliseconds, percent, rounded
from ..output.progress import ProgressDisplay, RunFacts
from ..output.stdout_formats import json_line
from ..output.tables import Column, lines_text, table
from ..output.terminal import Terminal
from ..run.opened_request import open_shared_model
from ..run.plan import plan_tiers
from ..signals import DONE, INTERRUPTED
from .methods import EXACT, MODES, settings_of
from .opened import prompt_tokens
from .report import provenance, shown, title


@dataclass(frozen=True, slots=True)
class QualityRequest:
    """A request, and what to compare: `modes` None is all that can run; the `last` tokens of the text are scored."""

    request: Request
    text: str
    modes: tuple[str, ...] | None
    context: tuple[int, ...]
    last: int


@dataclass(frozen=True, slots=True)
class OpenMode:
    """A mode that has been checked against its model; the weights are not loaded."""

    name: str
    settings: Settings
    model: OpenModel


def run_quality(asked: QualityRequest, terminal: Terminal, as_json: bool, quiet: bool, display: ProgressDisplay) -> int:
    """Measure every mode and write the report; return the exit code. Ctrl-C ends it with what is done.

    Closes the display. Raises TriforceError, OSError.
    """
    modes, left_out = _open_modes(asked, terminal, quiet)
    model = modes[EXACT].model
    ids, _ = prompt_tokens(model, asked.text, asked.context, asked.request)
    model.new_tokens(len(ids), 1, exact=True)
    if len(ids) <= asked.last:
        message = (
            f"the text has {counted(len(ids), 'token')}, and --last {asked.last:,} leaves none before those scored"
        )
        raise PromptError(message, "give a longer text, or use a smaller --last")
    found = _Quality(ids, asked.last, terminal, display)
    interrupted = False
    with closing(display):
        try:
            for mode in modes.values():
                found.measure(mode)
        except KeyboardInterrupt:
            interrupted = True
    if interrupted:
        terminal.after_ctrl_c()
    described = modes[EXACT].settings.described(Sampling(temperature=0))
    settings = {name: value for name, value in described.items() if name not in ("method", "stop")}
    facts = provenance(model.device, found.described) | {"model": described["model"], "text_tokens": len(ids)}
    facts |= {"scored_tokens": asked.last, "new_tokens": 0, "left_out": left_out}
    if as_json:
        report = {"type": "quality", "interrupted": interrupted, **rounded(facts | {"modes": found.rows})}
        terminal.write(json_line(**report, settings=settings))
    elif found.rows:
        terminal.print(_text(facts, found.rows, terminal.table_width))
    return INTERRUPTED if interrupted else DONE


def _open_modes(asked: QualityRequest, terminal: Terminal, quiet: bool) -> tuple[dict[str, OpenMode], dict[str, str]]:
    """Return the modes; if the user has named none, those that can run, and why the others cannot."""
    opened, left_out = {}, {}
    compared = {"modes": asked.modes, "context": asked.context, "last": asked.last}
    for name in MODES if asked.modes is None else asked.modes:
        try:
            settings = settings_of(name, asked.request.settings)
            own = replace(asked.request, settings=settings)
            model = open_shared_model(own, settings.speculation, compared, terminal, quiet)
        except SettingsError as error:
            if asked.modes is not None or name == EXACT:
                raise
            left_out[name] = error.message
        else:
            opened[name] = OpenMode(name, settings, model)
    return opened, left_out


class _Quality:
    """Loads and scores one mode after the other; the first one's scores are the reference of the others.

    Attributes:
        rows: the measures of each mode that is done.
        described: the first engine, in text.
    """

    def __init__(self, ids: list[int], last: int, terminal: Terminal, display: ProgressDisplay) -> None:
        self.rows: list[dict[str, Any]] = []
        self.described = ""
        self._ids, self._last, self._terminal, self._display = ids, last, terminal, display
        self._exact: TextScores | None = None
        self._loaded: tuple[Any, Engine] | None = None

    def measure(self, mode: OpenMode) -> None:
        """Score a mode."""
        engine, meter = self._engine(mode), Meter(len(self._ids))
        self._display.start(RunFacts(meter, label=mode.name, pass_tokens=lambda: engine.model.pass_tokens))
        run = lambda runner: score_text(runner, self._ids, self._last, mode.name == EXACT, self._exact)  # noqa: E731
        with closing(engine.evaluate(self._ids, run, mode.settings.speculation)) as events:
            scores = self._read(events, meter)
        self._exact = self._exact or scores
        parts = mode.model.estimate(stored_tokens(mode.settings.speculation, len(self._ids))).parts
        row = {"mode": mode.name, "perplexity": perplexity(scores.log_probs), "kl": mean_divergence(scores)}
        row |= {"top1_agreement": None if mode.name == EXACT else top1_agreement(self._exact, scores)}
        row |= {
            "token_s": median(scores.seconds.tolist()),
            "kv_bytes": parts["KV cache"],
            "weights_bytes": parts["weights"],
        }
        self.rows.append(row | {"log_probs": scores.log_probs.tolist()})

    def _engine(self, mode: OpenMode) -> Engine:
        """Return a mode's engine with empty caches: the last one where the weights and formats are the same."""
        length = stored_tokens(mode.settings.speculation, len(self._ids))
        tiers = plan_tiers(mode.model, mode.settings, length, self._terminal)
        needed = mode.settings.engine, tiers
        if self._loaded is not None and self._loaded[0] == needed:
            self._loaded[1].release()
            return self._loaded[1]
        self._loaded = None  # free its memory first
        self._display.loading(f"{mode.name} · loading {mode.settings.engine.model}")
        engine = mode.model.load(tiers=tiers).without_end()
        self.described = self.described or engine.describe()
        self._loaded = needed, engine
        return engine

    def _read(self, events: Generator[Prefilled, None, TextScores], meter: Meter) -> TextScores:
        """Show the events of reading; return the scores."""
        while True:
            try:
                event = next(events)
            except StopIteration as end:
                self._display.hide()
                return end.value
            for each in meter.watch([event]):
                self._display.event(each)
            if event.done == event.total:
                self._display.hide()  # a bar would take time from what is measured


_COLUMNS = (
    (Column("mode", style="cyan"), lambda row: row["mode"]),
    (Column("perplexity", right=True, style="bold"), shown("perplexity", "{:.3f}".format)),
    (Column("KL", right=True, dropped=1), shown("kl", "{:.4f}".format)),
    (Column("same\ntop-1", right=True, dropped=2), shown("top1_agreement", percent)),
    (Column("ms a\ntoken", right=True, dropped=3), shown("token_s", milliseconds)),
    (Column("KV\nMiB", right=True, dropped=4), shown("kv_bytes", lambda size: f"{size / 2**20:,.1f}")),
    (Column("weights\nMiB", right=True, dropped=5), shown("weights_bytes", lambda size: f"{size / 2**20:,.1f}")),
)


def _text(facts: Mapping[str, Any], rows: list[dict[str, Any]], width: int | None) -> Text:
    scored = f"last {facts['scored_tokens']:,} of {facts['text_tokens']:,} tokens"
    found = lines_text([title(facts, scored)], width).append("\n")
    found.append_text(
        table([column for column, _ in _COLUMNS], [[to(row) for _, to in _COLUMNS] for row in rows], width)
    )
    left_out = [f"left out: {name}: {why}" for name, why in facts["left_out"].items()]
    return found.append_text(lines_text(left_out, width, "dim"))
