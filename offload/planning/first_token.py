"""Time to first token: the prompt is read, the retrieval cache selects, and one step is run."""

from dataclasses import replace

from ..architecture.footprint import PAGE_GRAIN
from ..architecture.kv_formats import stored_bytes
from ..hardware.rates import READ
from ..settings.method_sizes import has_middle, selected_chunk
from .passes import Passes, attention_flops
from .request import PlanRequest
from .roofline import (
    ALL_REDUCE_S,
    AWAY_LAUNCHES,
    COMPUTE,
    EXPERT_LAUNCHES,
    LAUNCH_S,
    PAGE_S,
    Time,
    hosted_experts_time,
    layer_launches,
    overlapped,
)

PAGE_LAUNCHES = 14  # of a page in a prefill's chunk, where torch's operations attend and merge
GATHER = 0.25  # of the host's bandwidth, which torch's gathering of chunks of a few KB reaches; an estimate


def first_token(passes: Passes) -> Time:
    """Return the time to first token, without loading. Offloaded KV is copied while the next rows are computed.

    In chunk order, offloaded weights are read again for every chunk, and offloaded KV as far as it is filled: half of
    it on average.
    """
    request, placed = passes.request, passes.placed
    shape, hardware, tokens = request.shape, request.hardware, request.tokens
    linear = 2 * shape.active_layer_parameters * tokens
    causal = attention_flops(shape, tokens, tokens) / 2
    chunks, rows = max(tokens / request.prefill_chunk, 1), min(tokens, request.prefill_chunk)
    chunk = Passes(replace(request, sequences=1), placed).linears(rows)
    linear -= chunks * chunk.hosted_expert_flops
    hosted = chunks * hosted_experts_time(chunk, hardware)
    compute = (linear + causal) / hardware.gpus / hardware.flops / COMPUTE
    compute += chunks * dequantizing(request)
    if hardware.gpus > 1:
        compute += 2 * shape.layers * (ALL_REDUCE_S * chunks + tokens * shape.hidden * request.itemsize / hardware.link)
    kv, experts = (placed.host.parts.get(name, 0) / hardware.gpus for name in ("KV cache", "experts"))
    weights = (shape.layers - placed.weight_layers) * shape.layer_bytes(request.bits) / hardware.gpus
    weights += experts if placed.experts_way(rows) == "stream" else 0
    by_layers = placed.prefill_order == "layers"
    disk = {}
    if placed.uses_disk:  # written once, and read back
        kv = 0 if request.has_one_memory else kv + placed.disk.parts["KV cache"] / hardware.gpus
        disk = {"disk": passes.on_disk * (1 if by_layers else 1 + chunks / 2) / hardware.disk_rate}
    moved = kv + weights if by_layers else kv * (1 + chunks / 2) + weights * chunks
    launches = 0.0
    if not hardware.shared:
        away = 0 if by_layers else shape.kv_layers - placed.resident_layers
        operations = shape.layers * layer_launches(hardware) + chunk.experts * EXPERT_LAUNCHES + away * AWAY_LAUNCHES
        launches = chunks * operations * LAUNCH_S + (1 if by_layers else chunks) * chunk.pages * PAGE_S
        launches += chunks / 2 * away * passes.pages * (passes.page_share * PAGE_S + PAGE_LAUNCHES * LAUNCH_S)
    computing = {"experts_on_the_host" if hosted > compute else "compute": compute + hosted}
    time = overlapped(link=moved / hardware.link, launches=launches, **computing, **disk)
    return replace(time, seconds=time.seconds + passes.full(1)[0].seconds + first_selection(passes))


def dequantizing(request: PlanRequest) -> float:
    """Return the seconds in which a GPU dequantises the layers' weights for a chunk: they are read, written and read.

    A product's arithmetic hides its own reading only where the weights are read once.
    """
    shape, hardware = request.shape, request.hardware
    if hardware.shared or not request.is_quantized:
        return 0.0
    moved = shape.layers * (shape.layer_bytes(request.bits) + shape.layer_parameters * 2 * request.itemsize)
    return moved / hardware.gpus / hardware.bandwidth / READ


def first_selection(passes: Passes) -> float:
    """Return the seconds of a GPU's first selection of a retrieval cache; 0 without one, and in a CPU's memory.

    From disk all keys are read, for their means, and then the pages of selected chunks: at most all.

    Of resident layers all keys are read. Of offloaded ones mean keys come over the link, which a prefill layer by layer
    has made; otherwise all pages come. The selected chunks are gathered on the host and copied.
    """
    request, placed, hardware = passes.request, passes.placed, passes.request.hardware
    settings, shape, gpus = request.speculation, request.shape, request.hardware.gpus
    if not has_middle(settings, request.tokens) or request.has_planes:
        return 0.0
    if hardware.shared:
        return 2 * passes.scoring()
    offloaded, growing = 1 - placed.resident_layers / shape.kv_layers, shape.growing
    kv, selected = (
        stored_bytes(growing, request.kv, tokens, request.itemsize) / gpus
        for tokens in (request.tokens, request.budget)
    )
    selected *= offloaded
    gathering = gpus * selected * 2 / (GATHER * hardware.host_bandwidth)  # read and written
    seconds = passes.scoring() + selected / hardware.link + gathering
    if placed.prefill_order == "layers":
        chunk = selected_chunk(settings, PAGE_GRAIN, tokens=request.tokens)
        return seconds + offloaded * kv / 2 / chunk / hardware.link
    launching = shape.kv_layers * passes.pages * (passes.page_share * PAGE_S + 3 * LAUNCH_S)
    return seconds + offloaded * (kv / hardware.link + launching)
