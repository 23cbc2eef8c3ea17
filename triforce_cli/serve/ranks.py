"""Ranks beside the one that serves: they generate what it generates, in step with it, and speak to nobody else."""

import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, replace
from typing import Any

from offload.batching.request import BatchRequest
from offload.engine import Engine
from offload.loading.tokenizers.tokenizer import Tokenizer
from offload.loading.tokenizers.tool_calls import ToolFormat
from offload.parallel import Group
from offload.settings.config import GenerationConfig, Sampling, Speculation
from offload.settings.constraint import Constraint

from .sequences import SequenceSettings, ServedSequence

IDLE_S = 3600.0  # between two messages at most: the other ranks do not wait for ever
_IDLE, _BATCH, _SEQUENCE, _END, _STOP = "idle", "batch", "sequence", "end", "stop"


class Leader:
    """Broadcasts from rank 0 what it is about to generate. All raise RankLost."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def idle(self) -> None:
        self._group.broadcast([_IDLE, None])

    def begin(self) -> None:
        """Begin a batch on all ranks."""
        self._group.broadcast([_BATCH, None])

    def add(self, sequence: ServedSequence, request: BatchRequest) -> BatchRequest:
        """Add a sequence to the batch; return its request, whose cancellation all ranks notice before one pass."""
        self._group.broadcast([_SEQUENCE, asdict(sequence.settings)])
        return replace(request, is_cancelled=lambda: self._group.agree([float(sequence.is_cancelled)])[0] > 0)

    def end(self) -> None:
        self._group.broadcast([_END, None])

    def stop(self) -> None:
        """End the other ranks, and wait until all have understood."""
        self._group.broadcast([_STOP, None])
        self._group.collect(None)


def follow(engine: Engine, group: Group, tokenizer: Tokenizer) -> None:
    """Generate what rank 0 does until it stops. Raises RankLost.

    SIGTERM is left to rank 0, which ends its requests first.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while (kind := group.broadcast(None)[0]) != _STOP:
        if kind == _BATCH:
            with closing(engine.generate_batch(_sequences(group, tokenizer), 1)) as events:
                for _ in events:
                    pass
    group.collect(None)


def _sequences(group: Group, tokenizer: Tokenizer) -> Iterator[BatchRequest]:
    while True:
        kind, settings = group.broadcast(None)
        if kind == _END:
            return
        if kind == _SEQUENCE:
            request = ServedSequence(unpacked(settings), tokenizer).request(0)
            yield replace(request, is_cancelled=lambda: group.agree([0.0])[0] > 0)


def unpacked(fields: dict[str, Any]) -> SequenceSettings:
    """Return settings whose fields, by `asdict`, have been JSON."""
    sampling, config, calls = fields["sampling"], fields["config"], fields["calls"]
    constraint = sampling["constraint"] and Constraint(**sampling["constraint"])
    changed = {
        "sampling": Sampling(**sampling | {"constraint": constraint}),
        "config": GenerationConfig(**config | {"stop": tuple(config["stop"])}),
        "speculation": Speculation(**fields["speculation"]),
        "calls": calls and ToolFormat(**calls | {"marks": tuple(calls["marks"])}),
    }
    return SequenceSettings(**fields | changed)
