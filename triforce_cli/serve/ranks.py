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
_END = "end"


def lead(group: Group | None, sequences: Iterator[ServedSequence | None]) -> Iterator[BatchRequest | None]:
    """Yield the requests of a batch's sequences, on rank 0 of a group each sent to the other ranks before.

    None ends the batch on all ranks, which begin the next one; the end of the sequences ends the other ranks.
    Raises RankLost.
    """
    for sequence in sequences:
        if group is not None:
            group.broadcast(None if sequence is None else asdict(sequence.settings))
        yield None if sequence is None else _agreeing(group, sequence.request())
    if group is not None:
        group.broadcast(_END)
        group.collect(None)  # until all have understood


def follow(engine: Engine, group: Group, tokenizer: Tokenizer) -> None:
    """Generate what rank 0 does until it stops. Raises RankLost.

    SIGTERM is left to rank 0, which ends its requests first.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    has_ended = False

    def requests() -> Iterator[BatchRequest | None]:
        nonlocal has_ended
        while (fields := group.broadcast(None)) != _END:
            yield fields and _agreeing(group, ServedSequence(unpacked(fields), tokenizer).request())
        group.collect(None)
        has_ended = True

    while not has_ended:
        with closing(engine.generate_batch(requests(), 1)) as events:
            for _ in events:
                pass


def _agreeing(group: Group | None, request: BatchRequest) -> BatchRequest:
    """Return the request, cancelled on all ranks before the same pass once it is cancelled on rank 0."""
    if group is None:
        return request
    return replace(request, is_cancelled=lambda: group.agree([float(request.is_cancelled())])[0] > 0)


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
