"""triforce's engine as a library: load a model, prefill a long prompt, decode. Knows nothing of terminals.

    from offload import EngineConfig, GenerationConfig, open_model

    opened = open_model(EngineConfig())
    engine = opened.load()
    ids = opened.tokenizer.chat("Hello", system=None)
    for event in engine.generate(ids, opened.sampling, GenerationConfig(max_new_tokens=20)):
        print(event)

Names are imported when they are first used, so that reading the configuration does not import torch.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "EngineConfig": "config",
    "GenerationConfig": "config",
    "Sampling": "config",
    "Speculation": "config",
    "Engine": "engine",
    "OpenModel": "opened_model",
    "open_model": "loader",
    "TriforceError": "errors",
    "Finished": "events",
    "Prefilled": "events",
    "Speculated": "events",
    "Text": "events",
    "Tokens": "events",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
