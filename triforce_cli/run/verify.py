"""`--verify`: plain greedy decoding again, and what to say of the comparison. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from offload.errors import TriforceError

from ..output.verdict import verdict

if TYPE_CHECKING:
    from offload.config import Sampling
    from offload.engine import Engine
    from offload.speculation.lossless import Choice, Replay

SHOWN = 100  # divergences in a summary: behind a fault there may be thousands


def compare(
    engine: Engine,
    ids: Sequence[int],
    emitted: Sequence[int],
    sampling: Sampling,
    ended_by: Collection[int] = (),
    length: int = 0,
) -> Replay:
    """What plain decoding says to the tokens emitted after `ids`.

    `ended_by` are the end-of-sequence tokens if one of them ended the run. It was not emitted, so plain decoding is
    asked for it apart: any of them is right, and if it chooses none, the one that it holds for the likeliest counts.
    """
    found = engine.replay(ids, emitted, sampling, length)
    endings = [engine.replay([*ids, *emitted], [token], sampling, length) for token in ended_by]
    wrong = [ending.divergences[0] for ending in endings if not ending.equal]
    if not endings or len(wrong) < len(endings):
        return found
    nearest = replace(min(wrong, key=lambda divergence: divergence.margin), position=len(emitted))
    return replace(found, divergences=(*found.divergences, nearest))


def described(found: Replay, decode: Callable[[list[int]], str], engine: str = "") -> dict[str, Any]:
    """The comparison for JSON and for the lines below; the first divergences with the texts of their tokens.

    `engine` is what computed both: `Engine.describe`.
    """
    divergences = [
        asdict(divergence)
        | {
            "emitted_text": decode([divergence.emitted]),
            "expected_text": decode([divergence.expected]),
            "is_tie": divergence.is_tie,
        }
        for divergence in found.divergences
    ]
    divergences.sort(key=lambda one: one["is_tie"])  # stable: what is no tie comes first, in its order
    return {
        "compared_with": "ar" + (f" on {engine}" if engine else ""),
        "tokens": found.tokens,
        "equal": found.equal,
        "lossless": found.lossless,
        "differing": len(divergences),
        "divergences": divergences[:SHOWN],
        "closest": None if found.closest is None else _choice(found.closest, decode),
    }


def _choice(choice: Choice, decode: Callable[[list[int]], str]) -> dict[str, Any]:
    return asdict(choice) | {
        "chosen_text": decode([choice.chosen]),
        "runner_up_text": decode([choice.runner_up]),
        "within_rounding": choice.within_rounding,
    }


def refuse_loss(verify: Mapping[str, Any]) -> None:
    """Raises TriforceError if the output is not that of plain decoding, but for floating-point ties."""
    if not verify["lossless"]:
        raise TriforceError(verdict(verify), "this is a bug in triforce; --method ar decodes plainly")
