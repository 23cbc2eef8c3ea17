"""Run a whole book through a long-context model, as a library: text in, text out, or tokens in, events out.

    from triforce import LLM  # or from offload

    llm = LLM("smollm2-135m")
    for piece in llm.ask(book, "Who is Alice?"):
        print(piece, end="", flush=True)

docs/library.md has more. Names are imported when they are first used, so that reading the configuration does not import
torch. Knows nothing of terminals.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers and editors see; a test compares it with _HOMES
    from .api.ask_options import Answer, AskOptions, BatchAnswer
    from .api.llm import LLM, DocumentSession
    from .api.loader import open_model
    from .api.opened_model import OpenModel
    from .engine import Engine
    from .errors import (
        CheckpointError,
        FetchError,
        ModelNotFound,
        OutOfMemory,
        PromptError,
        SettingsError,
        TriforceError,
        UnsupportedModel,
        UsageError,
    )
    from .events import Event, Finished, Prefilled, Speculated, Text, Thought, Tokens
    from .loading.tokenizers.tokenizer import Tokenizer
    from .memory.tier_settings import TierSettings
    from .settings.config import EngineConfig, Speculation
    from .settings.constraint import Constraint
    from .settings.generation import GenerationConfig, Sampling

_MODULES = {
    "api.llm": "LLM DocumentSession",
    "api.ask_options": "Answer AskOptions BatchAnswer",
    "settings.config": "EngineConfig Speculation",
    "settings.constraint": "Constraint",
    "settings.generation": "GenerationConfig Sampling",
    "memory.tier_settings": "TierSettings",
    "engine": "Engine",
    "api.opened_model": "OpenModel",
    "loading.tokenizers.tokenizer": "Tokenizer",
    "api.loader": "open_model",
    "errors": (
        "CheckpointError FetchError ModelNotFound OutOfMemory PromptError SettingsError TriforceError "
        "UnsupportedModel UsageError"
    ),
    "events": "Event Finished Prefilled Speculated Text Thought Tokens",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = [  # spelt out: type checkers read no expression
    "LLM",
    "Answer",
    "AskOptions",
    "BatchAnswer",
    "CheckpointError",
    "Constraint",
    "DocumentSession",
    "Engine",
    "EngineConfig",
    "Event",
    "FetchError",
    "Finished",
    "GenerationConfig",
    "ModelNotFound",
    "OpenModel",
    "OutOfMemory",
    "Prefilled",
    "PromptError",
    "Sampling",
    "SettingsError",
    "Speculated",
    "Speculation",
    "Text",
    "Thought",
    "TierSettings",
    "Tokenizer",
    "Tokens",
    "TriforceError",
    "UnsupportedModel",
    "UsageError",
    "open_model",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
