"""The table of decoding methods: the drafter of each, and the middle level between drafter and full KV cache.

A new method is a new row. Imports nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

PLAIN = "ar"  # the method that drafts nothing
LOOKUP, MODEL = "lookup", "model"  # drafters: n-gram lookup and a draft model
CHOSEN = "chosen"  # the drafter that `Speculation.draft` names
RETRIEVAL, STREAMING = "retrieval", "streaming"  # how a middle level selects chunks: by score, or the latest
STREAMING_LLM, H2O = "streaming-llm", "h2o"  # caches that forget tokens
MIDDLES = (RETRIEVAL, STREAMING, H2O)  # h2o: those chunks that have received the most attention so far
APPROXIMATIONS = (STREAMING_LLM, H2O, RETRIEVAL)  # what the target can run on instead of all its keys and values


@dataclass(frozen=True, slots=True)
class Method:
    """The levels below the target on its full KV cache.

    `drafter` is LOOKUP, MODEL, CHOSEN or None. `middle` is RETRIEVAL or STREAMING if the target also runs on selected
    chunks, between the drafter and the full cache, else None. An `adaptive` method switches its levels on and off by
    their measured speed-up; `alternative` is another middle level that it chooses from on a CPU.
    """

    name: str
    drafter: str | None = None
    middle: str | None = None
    adaptive: bool = False
    alternative: str | None = None

    @property
    def needs_draft_model(self) -> bool:
        """Return whether the method requires a draft model."""
        return self.drafter == MODEL

    @property
    def speculates(self) -> bool:
        """Return whether anything is drafted; otherwise the target decodes token by token."""
        return self.drafter is not None or self.middle is not None


METHODS = {
    method.name: method
    for method in (
        Method("auto", drafter=CHOSEN, middle=RETRIEVAL, adaptive=True, alternative=STREAMING),
        Method(PLAIN),
        Method("lookup", drafter=LOOKUP),
        Method("naive", drafter=MODEL),
        Method("retrieval", middle=RETRIEVAL),
        Method("streaming", drafter=CHOSEN, middle=STREAMING),
        Method("triforce", drafter=CHOSEN, middle=RETRIEVAL),
    )
}
