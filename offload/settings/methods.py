"""The tables of decoding methods, and of the caches that the target can run on instead of its full one.

A new method is a new row; so is a new approximate cache, beside its file. Imports nothing heavy.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

PLAIN = "ar"  # the method that drafts nothing
LOOKUP, MODEL = "lookup", "model"  # drafters: n-gram lookup and a draft model
CHOSEN = "chosen"  # the drafter that `Speculation.draft` names
RETRIEVAL, STREAMING = "retrieval", "streaming"  # middle levels of methods: chunks by score, or the latest


@dataclass(frozen=True, slots=True)
class Method:
    """The levels below the target on its full KV cache.

    `drafter` is LOOKUP, MODEL, CHOSEN or None. `middle` is RETRIEVAL or STREAMING if the target also runs on selected
    chunks, between the drafter and the full cache, else None. An `adaptive` method switches its levels on and off by
    their measured speed-up.
    """

    name: str
    drafter: str | None = None
    middle: str | None = None
    adaptive: bool = False

    @property
    def needs_draft_model(self) -> bool:
        return self.drafter == MODEL

    @property
    def speculates(self) -> bool:
        """Return whether anything is drafted; otherwise the target decodes token by token."""
        return self.drafter is not None or self.middle is not None


METHODS = {
    method.name: method
    for method in (
        Method("auto", drafter=CHOSEN, middle=RETRIEVAL, adaptive=True),
        Method(PLAIN),
        Method("lookup", drafter=LOOKUP),
        Method("naive", drafter=MODEL),
        Method("retrieval", middle=RETRIEVAL),
        Method("streaming", drafter=CHOSEN, middle=STREAMING),
        Method("triforce", drafter=CHOSEN, middle=RETRIEVAL),
    )
}


def load_class(cls: str) -> Any:
    """Return a class from module:name; modules that need torch are imported no earlier."""
    module, _, name = cls.partition(":")
    return getattr(import_module(module), name)


@dataclass(frozen=True, slots=True)
class Middle:
    """A way in which a middle level selects chunks, `--middle`.

    `cls` is its class, an `offload.caches.selection.Selector`, as module:name. One that `scores` reads keys, and its
    chunks may be quantised. One with a `whole` format of keys and values selects nothing: it reads all tokens in it.
    `acceptance` is the rate at which the full cache is expected to accept its tokens, until that is measured: of a
    selection .92 to .89, by temperature, with 4K of 122K tokens (TriForce, table 2).
    """

    name: str
    cls: str
    scores: bool = True
    whole: str | None = None
    acceptance: float = 0.9

    def load(self) -> Any:
        return load_class(self.cls)


_SELECTION = "offload.caches.selection"
MIDDLES = {
    middle.name: middle
    for middle in (
        Middle(RETRIEVAL, f"{_SELECTION}:RetrievalSelector"),
        Middle(STREAMING, f"{_SELECTION}:RecencySelector", scores=False),
        # A part of packed keys and values.
        Middle("plane", f"{_SELECTION}:RecencySelector", scores=False, whole="plane", acceptance=0.97),
    )
}


@dataclass(frozen=True, slots=True)
class Approximation:
    """A cache that the target can run on instead of one of all its keys and values, `--approximate`.

    `cls` is its class, an `offload.caches.evicting.EvictingCache`, as module:name: it is imported when it is used.
    `reads` are the settings of `Speculation` that it depends on. It has a constant size, so any prompt fits.
    """

    name: str
    cls: str
    reads: tuple[str, ...]

    def load(self) -> Any:
        return load_class(self.cls)


APPROXIMATIONS = {
    approximation.name: approximation
    for approximation in (
        Approximation("streaming-llm", "offload.caches.evicting:SinkCache", ("sink", "budget")),
        Approximation("h2o", "offload.caches.h2o:H2OCache", ("sink", "window", "budget")),
    )
}
