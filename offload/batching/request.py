"""What one sequence of a batch is to do."""

from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, field

from ..events import Event
from ..settings.config import GenerationConfig, Sampling, Speculation

Events = Generator[Event, int | None]


def never() -> bool:
    """Return False: a sequence that is not cancelled."""
    return False


@dataclass(frozen=True)
class BatchRequest:
    """A prompt of token `ids` to be answered in a batch, as by `Engine.generate`.

    `key` names its events. `text` turns the engine's events into those that are wanted, as `text_stream.stream_text`.
    `is_cancelled` is called before each pass, in the batch's thread; once it returns True, the sequence ends.
    Sequences share what is cached of a common beginning, in memory and on disk, within one `scope` only.
    `logprobs` as of `Engine.generate`.
    """

    key: Hashable
    ids: Sequence[int]
    sampling: Sampling
    config: GenerationConfig
    speculation: Speculation = field(default_factory=Speculation)
    text: Callable[[Events], Events] = field(default=lambda events: events)
    is_cancelled: Callable[[], bool] = never
    scope: str = ""
    logprobs: int | None = None
