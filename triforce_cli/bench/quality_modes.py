"""`bench --quality` with its models opened: all checks that need no weights."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from offload.api.opened_model import OpenModel
from offload.engine import Engine
from offload.errors import PromptError, SettingsError
from offload.evaluation.needles import Needle, make_needles
from offload.memory.tier_settings import TierSettings
from offload.settings.config import Speculation
from offload.settings.method_sizes import forgets, stored_tokens
from offload.units import counted

from ..options.command_request import Request
from ..options.mode_checks import warn_of_chunks
from ..options.settings import Settings
from ..output.progress import ProgressDisplay
from ..output.terminal import Terminal
from ..run.model_request import open_shared_model, stretch
from ..run.plan import plan_tiers
from .benchmark import note_grouped
from .compared import EXACT, MODES, is_dense, recomputes, settings_of
from .prompts import first_tokens


@dataclass(frozen=True, slots=True)
class QualityRequest:
    """A request, and what to compare. `modes` None is all that can run; `context` is the tokens to use, None all.

    `last` tokens of the text are scored, and `needles` texts with a needle are read.
    """

    request: Request
    text: str
    modes: tuple[str, ...] | None
    context: int | None
    last: int
    needles: int


@dataclass(frozen=True, slots=True)
class OpenMode:
    """A mode that has been checked against its model; the weights are not loaded."""

    name: str
    settings: Settings
    model: OpenModel
    tiers: TierSettings | None

    @property
    def speculation(self) -> Speculation:
        return self.settings.speculation

    @property
    def recomputed(self) -> int | None:
        """Return the tokens of the window that is run anew for each token; None for a mode with a cache."""
        return self.speculation.kept_tokens if recomputes(self.name) else None

    @property
    def is_unlimited(self) -> bool:
        """Return whether the mode runs a text of any length: it forgets, or is there to show what happens."""
        return self.recomputed is not None or is_dense(self.name) or forgets(self.speculation)

    def stored(self, length: int) -> int:
        """Return how many tokens the cache stores of a sequence of `length`."""
        return stored_tokens(self.speculation, self.longest(length))

    def longest(self, length: int) -> int:
        """Return how many tokens of a text of `length` are run as one sequence at most."""
        return min(length, self.recomputed or length)


@dataclass(frozen=True, slots=True)
class QualityRun:
    """All modes, the exact one first, over one text and its needles; `left_out` are modes and why.

    Beyond the model's context there is no exact one, if all others run there: nothing is then compared with it.
    """

    modes: tuple[OpenMode, ...]
    ids: list[int]
    needles: tuple[Needle, ...]
    last: int
    left_out: Mapping[str, str]

    @property
    def new_tokens(self) -> int:
        """Tokens of greedy decoding after the text."""
        return self.modes[0].settings.generation.max_new_tokens

    @property
    def length(self) -> int:
        """Tokens of text and output."""
        return len(self.ids) + self.new_tokens


def open_quality_run(asked: QualityRequest, terminal: Terminal, quiet: bool) -> QualityRun:
    """Open the model of each mode and check it before weights are loaded. Raises TriforceError."""
    compared = {"modes": asked.modes, "context": asked.context, "last": asked.last, "needles": asked.needles}
    opened, left_out = open_modes(
        MODES if asked.modes is None else asked.modes, asked.modes is not None, asked.request, compared, terminal, quiet
    )
    model = opened[EXACT].model
    ids = first_tokens(model.tokenizer.encode(asked.text, special_tokens=True), asked.context)
    if len(ids) <= asked.last:
        raise PromptError(
            f"the text has {counted(len(ids), 'token')}, and --last {asked.last:,} leaves none before those scored",
            "give a longer text, or use a smaller --last",
        )
    new = asked.request.settings.generation.max_new_tokens
    opened = fitted(opened, asked.request, len(ids), new, left_out, terminal)
    run = QualityRun(tuple(opened.values()), ids, _needles(asked, ids, model), asked.last, left_out)
    note_grouped(asked.context, terminal)
    selecting = [mode.speculation for mode in run.modes if mode.speculation.approximate is not None]
    warn_of_chunks(model, asked.request.settings, selecting, run.length, False, terminal)
    return run


def open_modes(
    modes: Iterable[str],
    are_named: bool,
    request: Request,
    compared: Mapping[str, Any],
    terminal: Terminal,
    quiet: bool,
) -> tuple[dict[str, OpenMode], dict[str, str]]:
    """Return the modes; if the user has not named them, those that can run, and why the others cannot.

    `compared` has what must be the same on all ranks. Raises TriforceError.
    """
    opened, left_out = {}, {}
    for name in modes:
        try:
            settings = settings_of(name, request.settings)
            own = replace(request, settings=settings)
            model = open_shared_model(own, settings.speculation, compared, terminal, quiet)
        except SettingsError as error:
            if are_named or name == EXACT:
                raise
            left_out[name] = error.message
        else:
            opened[name] = OpenMode(name, settings, model, None)
    return opened, left_out


def fitted(
    modes: Mapping[str, OpenMode], request: Request, tokens: int, new: int, left_out: dict[str, str], terminal: Terminal
) -> dict[str, OpenMode]:
    """Return the modes with a context and a placement for a text and its output, but for those that cannot run it.

    Raises TriforceError.
    """
    if request.extend_context:
        stretch(modes[EXACT].model, tokens + new, terminal)  # warns
        modes = {name: replace(mode, model=mode.model.stretched(tokens + new)) for name, mode in modes.items()}
    kept = _fitting(modes, tokens, new, left_out)
    return kept if request.dry_run else {name: with_tiers(each, tokens + new, terminal) for name, each in kept.items()}


def _fitting(modes: Mapping[str, OpenMode], tokens: int, new: int, left_out: dict[str, str]) -> dict[str, OpenMode]:
    """Return the modes that run a text: where it exceeds the context, without the exact one if all others can.

    Raises PromptError.
    """
    others = {name: mode for name, mode in modes.items() if name != EXACT}
    try:
        modes[EXACT].model.new_tokens(tokens, new, exact=True)
        kept = dict(modes)
    except PromptError as error:
        if not others or not all(mode.is_unlimited for mode in others.values()):
            hint = f"{error.hint}, or --modes that run there, without exact: streaming-llm, h2o, dense, recompute"
            raise PromptError(error.message, hint) from None
        left_out[EXACT] = error.message
        kept = others
    return {
        name: replace(mode, model=mode.model.beyond_context(tokens + new)) if is_dense(name) else mode
        for name, mode in kept.items()
    }


def with_tiers(mode: OpenMode, length: int, terminal: Terminal) -> OpenMode:
    """Return the mode with a placement for sequences of `length`. Raises TriforceError."""
    return replace(mode, tiers=plan_tiers(mode.model, mode.settings, mode.stored(length), terminal))


def _needles(asked: QualityRequest, ids: list[int], model: OpenModel) -> tuple[Needle, ...]:
    """Return the needles, each in a text as long as the one that is scored. Raises PromptError."""
    if not asked.needles:
        return ()
    try:
        return tuple(make_needles(ids, lambda text: model.tokenizer.encode(text, special_tokens=False), asked.needles))
    except ValueError as error:
        raise PromptError(str(error), "give a longer text, or use --needles 0") from error


class ModeEngines:
    """Loads one mode after the other. What the last one has loaded serves again where nothing of it differs.

    Attributes:
        described: the first engine, in text; "" before it is loaded.
    """

    def __init__(self, display: ProgressDisplay) -> None:
        self.described = ""
        self._display = display
        self._engine: Engine | None = None
        self._loaded: OpenMode | None = None

    def load(self, mode: OpenMode, length: int) -> Engine:
        """Return a mode's engine, with empty caches for sequences of `length`, which no token ends."""
        last, engine = self._loaded, self._engine
        if engine is not None and last is not None and _loads(last) == _loads(mode):
            engine.release()
        else:
            self._engine = self._loaded = engine = None  # free its memory first
            self._display.loading(f"{mode.name} · loading {mode.settings.engine.model}")
            engine = self._engine = mode.model.load(tiers=mode.tiers).without_end()
            self._loaded = mode
        engine.reserve(mode.longest(length))
        self.described = self.described or engine.describe()
        return engine


def _loads(mode: OpenMode) -> tuple[Any, ...]:
    """Return all that the engine of a mode depends on."""
    return mode.settings.engine, mode.tiers, mode.model.checkpoint.shape.context
