"""What one prompt takes on several machines that share its tokens. Imports no torch.

Each machine has all weights, and keeps the keys and values of its share of the tokens. A prompt is read by ring
attention (arXiv 2310.01889): the keys and values of all others pass by, one share at a time, while the share before is
attended to; with striped tokens (arXiv 2311.09431) all have as much to do, half of the products. A further token is
computed on all of them; each attends to its share, and the partial sums of each layer are merged by their log-sum-exp
(arXiv 2408.04093). Nothing here runs that way: what runs over machines shares heads, which is the plan `by_heads`.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from .pass_work import attention_flops
from .plan import Plan, make_plan
from .request import PlanRequest
from .roofline import ALL_REDUCE_S, COMPUTE

# One port of InfiniBand NDR for each GPU, as in DGX H100: 400 Gbit/s (data sheets of ConnectX-7 and DGX H100). Most of
# it is reached by large messages; the latency of small ones is ALL_REDUCE_S, once for each doubling of the machines.
NODE_LINK_GB_S = 50.0
MOST_NODES = 1024


@dataclass(frozen=True, slots=True)
class NodePlan:
    """A plan for `count` machines, each with a share of the tokens: `share` is one machine's plan for that.

    `exchanged` are the bytes of keys and values that each receives while the prompt is read, in `exchange_s` seconds,
    beside `attention_s` of computing. `by_heads` shares heads among the same machines.
    """

    count: int
    alone: Plan
    share: Plan
    by_heads: Plan
    ttft_s: float
    tbt_s: float
    exchanged: float
    exchange_s: float
    attention_s: float

    @property
    def fits(self) -> bool:
        return self.share.fits

    @property
    def hides_exchange(self) -> bool:
        """Return whether the exchange takes no longer than the attention that it runs beside."""
        return self.exchange_s <= self.attention_s

    @property
    def gains(self) -> tuple[float, float]:
        """Return how many times as fast as on one machine the first token comes, and a further one, plainly."""
        return self.alone.ttft.seconds / self.ttft_s, self.alone.plain.tbt.seconds / self.tbt_s


def plan_nodes(alone: Plan, counts: Iterable[int], link: float = NODE_LINK_GB_S * 1e9) -> tuple[NodePlan, ...]:
    """Return plans for several numbers of machines such as that of a plan; `link`: bytes a second of each machine's."""
    return tuple(_plan(alone, count, link) for count in counts)


def _plan(alone: Plan, count: int, link: float) -> NodePlan:
    request, hardware = alone.request, alone.request.hardware
    shape, tokens = request.shape, request.tokens
    share = make_plan(replace(request, tokens=-(-tokens // count)))
    rate = hardware.gpus * hardware.flops * COMPUTE
    attention_s = attention_flops(shape, tokens, tokens) / 2 / count / rate
    own_s = attention_flops(shape, share.request.tokens, share.request.tokens) / 2 / rate  # in the share's plan
    exchanged = request.kv_bytes(tokens) * (count - 1) / count
    exchange_s = exchanged / link
    ttft = share.ttft.seconds + max(attention_s, exchange_s) - own_s
    sums = shape.heads * (shape.head_dim + 2) * 4  # of float32: a row of the output, the largest score and the sum
    merging = shape.layers * math.ceil(math.log2(count)) * (ALL_REDUCE_S + sums / link)
    tbt = share.plain.tbt.seconds + merging
    return NodePlan(
        count, alone, share, make_plan(_by_heads(request, count, link)), ttft, tbt, exchanged, exchange_s, attention_s
    )


def _by_heads(request: PlanRequest, count: int, link: float) -> PlanRequest:
    """Return the request for ranks on all machines, whose sums go over the slower one of both links."""
    own = request.hardware
    memory = None if own.host_memory is None else own.host_memory * count
    hardware = replace(
        own,
        gpus=own.gpus * count,
        link=min(own.link, link),
        host_memory=memory,
        host_bandwidth=own.host_bandwidth * count,
        host_flops=own.host_flops * count,
    )
    return replace(request, hardware=hardware)
