"""Requests to tiny engines, and their tokens."""

from offload import GenerationConfig, Sampling, Speculation, Tokens
from offload.engine import Engine
from offload.settings.config import METHODS

GREEDY = Sampling(temperature=0)
SMALL = {"budget": 32, "chunk": 4, "sink": 4, "window": 16}  # caches
ALL = [
    *((method, draft) for method in METHODS if method != "naive" for draft in ("lookup", "none", "model")),
    ("naive", "model"),
]


def fresh(engine):
    """Make another engine with the same models and empty caches."""
    return Engine(engine.model, tuple(engine.eos_ids), 16, engine.draft)


def run(engine, prompt, count=40, method="ar", draft="lookup", sampling=GREEDY, seed=0, **more):
    """Return all events of one request."""
    wanted = Speculation(method, "a model" if draft == "model" else draft, **SMALL | more)
    return list(engine.generate(prompt, sampling, GenerationConfig(max_new_tokens=count, seed=seed), wanted))


def tokens(events):
    return [token for event in events if isinstance(event, Tokens) for token in event.ids]


def finished(events):
    """Return what a generator returns."""
    while True:
        try:
            next(events)
        except StopIteration as end:
            return end.value
