"""Plans for several machines, as text and as fields of JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from offload.planning.nodes import NodePlan
from offload.units import size_text

from .format import duration


def node_lines(nodes: Sequence[NodePlan]) -> Iterator[str]:
    """Yield two lines for each number of machines: tokens shared, and heads shared, which is what runs today."""
    for each in nodes:
        name = f"nodes {each.count}"
        yield f"{name:<10} {_by_tokens(each) if each.fits else each.share.shortage()}"
        heads = each.by_heads
        times = f"{duration(heads.ttft.seconds)} to the first token, {1 / heads.plain.tbt.seconds:,.1f} tokens/s plain"
        yield f"{'':<10} heads shared (torchrun): {times if heads.fits else heads.shortage()}"


def _by_tokens(node: NodePlan) -> str:
    first, further = (f", {gain:.1f}x one" if node.alone.fits else "" for gain in node.gains)
    hidden = "behind attention" if node.hides_exchange else "more than attention takes"
    return (
        f"tokens shared (planned only): {duration(node.ttft_s)} to the first token{first}; "
        f"{1 / node.tbt_s:,.1f} tokens/s plain{further}; {size_text(int(node.exchanged))} to each in "
        f"{duration(node.exchange_s)}, {hidden}"
    )


def node_fields(nodes: Sequence[NodePlan]) -> list[dict[str, Any]]:
    """Return the fields of each plan for several machines."""
    return [_fields(each) for each in nodes]


def _fields(node: NodePlan) -> dict[str, Any]:
    names = ("count", "fits", "ttft_s", "tbt_s", "exchanged", "exchange_s", "attention_s", "hides_exchange")
    heads = node.by_heads
    return {name: getattr(node, name) for name in names} | {
        "gains": list(node.gains) if node.alone.fits else None,
        "missing": node.share.shortage() or None,
        "by_heads": {"fits": heads.fits, "ttft": asdict(heads.ttft), "tbt_s": heads.plain.tbt.seconds},
    }
