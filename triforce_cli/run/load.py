"""Plans and loads a model for sequences of a length, or prints the plan."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from offload.engine import Engine
from offload.prompt_cache.prefill import PromptCache
from offload.settings.method_sizes import stored_tokens

from ..options.approximate import lossy_modes
from ..options.request import OutputOptions
from ..output.plan import print_plan
from ..output.terminal import Terminal
from .model_request import ModelRequest
from .plan import plan_run, plan_tiers
from .prompt_cache import memory_limit, open_prompt_cache

if TYPE_CHECKING:
    from offload.memory.tier_settings import TierSettings


class Display(Protocol):
    """What shows that a model is being loaded: a Renderer, or a ProgressDisplay."""

    def loading(self, text: str) -> None:
        """Show this text, until something else is shown."""

    def close(self) -> None:
        """Erase everything, and draw nothing more."""


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine, the prompt cache on disk that it uses, if any, and the seconds to find, check and load the model."""

    engine: Engine
    prompt_cache: PromptCache | None
    load_s: float


def print_dry_run(
    opened: ModelRequest, longest: int, terminal: Terminal, output: OutputOptions, display: Display
) -> int:
    """Print the plan for a sequence of `longest` tokens; return the exit code. Raises TriforceError."""
    report = plan_run(opened.model, opened.settings, longest, terminal)
    report = replace(report, arguments=opened.request.arguments)
    display.close()  # the plan is the output
    return print_plan(report, opened.request.command, terminal, output.json)


def plan_longest(opened: ModelRequest, longest: int, terminal: Terminal) -> TierSettings | None:
    """Return where the KV cache of a sequence of `longest` tokens lies, as `plan_tiers`. Raises TriforceError."""
    settings = opened.settings
    return plan_tiers(opened.model, settings, stored_tokens(settings.speculation, longest), terminal)


def load_engine(opened: ModelRequest, longest: int, tiers: TierSettings | None, display: Display) -> LoadedEngine:
    """Load the model for sequences of up to `longest` tokens. Raises TriforceError."""
    model, settings = opened.model, opened.settings
    is_exact = not lossy_modes(settings)
    display.loading(f"loading {settings.engine.model}")
    stored = stored_tokens(settings.speculation, longest)
    prompt_cache = open_prompt_cache(model, settings, opened.request.home, stored)
    started = time.perf_counter()
    room = model.kv_room(stored, memory_limit(model, settings, stored), int(opened.request.verify))
    engine = model.load(tiers=tiers, prompts=prompt_cache, capacity=longest if is_exact else 0)
    engine.reserve(longest)
    engine.limit_batches(room)
    return LoadedEngine(engine, prompt_cache, opened.open_s + time.perf_counter() - started)
