"""`--verify`: decodes plainly again, and describes the comparison. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from offload.errors import TriforceError

from ..output.statistics import verification_line

if TYPE_CHECKING:
    from offload.engine import Engine
    from offload.settings.config import Sampling
    from offload.speculation.levels.lossless import Divergence, Replay

SHOWN = 100  # divergences in a summary: after a fault there may be thousands


def compare(
    engine: Engine,
    ids: Sequence[int],
    emitted: Sequence[int],
    sampling: Sampling,
    ended_by: Collection[int] = (),
    length: int = 0,
    seed: int = 0,
) -> Replay:
    """Return the comparison of plain decoding with the tokens emitted after `ids`.

    `ended_by` are the end-of-sequence tokens if one of them ended the run. It was not emitted, so it is compared
    separately: any of them is correct, and if plain decoding chooses none, the likeliest of them is the divergence.
    """
    replay = engine.replay(ids, emitted, sampling, length, seed=seed)
    endings = [engine.replay([*ids, *emitted], [token], sampling, length, len(emitted), seed) for token in ended_by]
    wrong = [ending.divergences[0] for ending in endings if not ending.equal]
    if not endings or len(wrong) < len(endings):
        return replay
    nearest = replace(min(wrong, key=lambda divergence: divergence.margin), position=len(emitted))
    return replace(replay, divergences=(*replay.divergences, nearest))


def verification_fields(replay: Replay, decode: Callable[[list[int]], str], engine: str = "") -> dict[str, Any]:
    """Return the comparison's fields for JSON and messages; the first divergences with the texts of their tokens.

    `engine` describes the engine that computed both: `Engine.describe`.
    """

    def described(one: Divergence) -> dict[str, Any]:
        texts = {"emitted_text": decode([one.emitted]), "expected_text": decode([one.expected])}
        return asdict(one) | texts | {"is_tie": one.is_tie}

    divergences = [described(one) for one in replay.divergences]
    divergences.sort(key=lambda divergence: divergence["is_tie"])  # stable: those that are not ties come first
    return {
        "compared_with": "ar" + (f" on {engine}" if engine else ""),
        "tokens": replay.tokens,
        "equal": replay.equal,
        "lossless": replay.lossless,
        "differing": len(divergences),
        "divergences": divergences[:SHOWN],
    }


def refuse_loss(verify: Mapping[str, Any]) -> None:
    """Raise TriforceError if the output differs from plain decoding by more than floating-point ties."""
    if not verify["lossless"]:
        raise TriforceError(verification_line(verify), "this is a bug in triforce; --method ar decodes plainly")
