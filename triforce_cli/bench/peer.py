"""What `bench --ladder --peers` asks another program for, and what it answers. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from offload.settings.generation import Sampling

if TYPE_CHECKING:
    from offload.api.opened_model import OpenModel

READ = ("temperature", "top_p", "top_k", "min_p")  # what peers read of how tokens are sampled


class Task(NamedTuple):
    """What a peer is to generate. `expected` is plain decoding's answer, where it is known."""

    ids: Sequence[int]
    new_tokens: int
    sampling: Sampling
    seed: int
    expected: Sequence[int] | None = None

    @property
    def chosen(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self.sampling).items() if name in READ}


class Answer(NamedTuple):
    """What a peer measured, by the names of a run's measures, and its tokens; whether ours may be compared."""

    measured: dict[str, Any]
    tokens: list[int]
    is_comparable: bool = True


class Peer(Protocol):
    """A program to measure. `facts` and what runs raise TriforceError."""

    name: str

    @property
    def facts(self) -> dict[str, Any]:
        """Return what its runs depend on, beside the request."""

    def open(self, model: OpenModel, longest: int) -> None:
        """Check that it can run a model, for sequences of up to `longest` tokens. Raises TriforceError."""

    def run(self, task: Task) -> Answer:
        """Generate once."""

    def close(self) -> None:
        """Release what it holds; the next run begins anew."""
