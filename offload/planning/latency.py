"""The latency of a placement: the time to first token, and the time between tokens for each method.

Tokens per verification follow from the acceptance rate (Leviathan et al., arXiv 2211.17192), applied to each level in
turn (TriForce, arXiv 2404.11912).
"""

from dataclasses import dataclass, replace

from ..architecture.head_shape import HeadDimensions, published_acceptance
from ..architecture.kv_formats import BLOCK, stored_bytes
from ..hardware.rates import READ
from ..settings.config import LONGEST_GAMMA
from ..settings.method_sizes import TAIL, drafter_kind, has_draft_model, has_middle, selected_chunk
from ..settings.methods import CHOSEN, LOOKUP, METHODS, MIDDLES
from ..speculation.passes.estimators import expected_tokens
from .inputs import PlanInputs
from .passes import Passes, attention_flops
from .roofline import (
    ALL_REDUCE_S,
    AWAY_LAUNCHES,
    COMPUTE,
    EXPERT_LAUNCHES,
    LAUNCH_S,
    PAGE_S,
    Pass,
    Time,
    layer_launches,
)

# Used until acceptance is measured; that of middle levels is in methods.py. Of the draft model's tokens of TriForce
# (JackFram/llama-68m) the retrieval level accepts .23 in the authors' runs (ranonrkm/TriForce-legacy); larger draft
# models are accepted more often, so .35 is a guess.
DRAFT_ACCEPTANCE = 0.35
LOOKUP_ACCEPTANCE = 0.3  # n-gram lookup on summaries of books: it drafts at half of the positions, and 60 % is accepted
EQUAL = 1.01  # within this factor of the best time, predictions cannot tell drafts apart: the shortest is chosen
SELECTION_TOKENS = TAIL // 2  # after about so many, the retrieval cache selects again
GAMMAS = range(1, LONGEST_GAMMA + 1)
PAGE_LAUNCHES = 14  # of a page in a prefill's chunk, where torch's operations attend and merge
GATHER = 0.25  # of the host's bandwidth, which torch's gathering of chunks of a few KB reaches; an estimate


@dataclass(frozen=True, slots=True)
class Decoding:
    """A decoding method with its predicted speed.

    `tbt` is the time between tokens. `host_share` is the fraction of the offloaded KV to which the host attends. gamma1
    and gamma2 are the tokens drafted for a verification (0: no such level). `verify_s` and `draft_s` are the seconds of
    one verification and of the drafting before it. gamma2 counts the nodes of a tree, and `depth` is the tree's; 0 for
    a chain.
    """

    method: str
    tbt: Time
    host_share: float
    verify_s: float
    draft_s: float = 0.0
    tokens_per_verification: float = 1.0
    gamma1: int = 0
    gamma2: int = 0
    depth: int = 0


def predict(passes: Passes, method: str) -> Decoding:
    """Predict a method's speed, with the requested draft lengths, or the best ones."""
    row, speculation = METHODS[method], passes.inputs.speculation
    if not row.speculates:
        time, share = passes.full(1)
        seconds = time.seconds + passes.sample_s
        return Decoding(method, replace(time, seconds=seconds), share, seconds)
    if speculation.tree_shape.kind != "chain" and row.middle is None and row.drafter != LOOKUP:
        return _tree(passes, method)
    token_s, gamma1, acceptance = _proposal(passes, method)
    selecting = 0.0  # seconds a token
    if row.middle is not None and MIDDLES[speculation.middle or row.middle].scores:
        selecting = passes.selecting() / SELECTION_TOKENS
    decodings = []
    for gamma in GAMMAS if speculation.gamma2 is None else (speculation.gamma2,):
        tokens = expected_tokens(acceptance, gamma)
        # Levels do not overlap: while one drafts, the link prefetches only one page.
        decodings.append(_verified(passes, method, gamma * token_s + tokens * selecting, tokens, gamma))
    shortest = min(decoding.tbt.seconds for decoding in decodings)
    best = next(decoding for decoding in decodings if decoding.tbt.seconds <= EQUAL * shortest)
    return replace(best, gamma1=gamma1)


def _verified(passes: Passes, method: str, drafting: float, tokens: float, nodes: int) -> Decoding:
    """Predict decoding where drafting takes so many seconds, and verifying its nodes yields so many tokens."""
    time, share = passes.full(nodes + 1)
    verifying = time.seconds + 2 * passes.sample_s
    resources = {name: seconds / tokens for name, seconds in time.resources.items()}
    bound = time.bound if verifying >= drafting else "drafting"
    tbt = Time((drafting + verifying) / tokens, bound, resources | {"drafting": drafting / tokens})
    return Decoding(method, tbt, share, verifying, drafting, tokens, gamma2=nodes)


def _tree(passes: Passes, method: str) -> Decoding:
    """Predict decoding with token trees, whose first children are accepted at a rate; a draft step a depth."""
    from ..speculation.trees.acceptance import Acceptance
    from ..speculation.trees.best_size import sized_tree  # imports numpy, which takes a tenth of a second
    from ..speculation.trees.tree import tree_of

    def verify(rows: int) -> float:
        return passes.full(rows)[0].seconds + 2 * passes.sample_s

    rates = Acceptance(draft_acceptance(passes.inputs)).rates(0)
    tree = sized_tree(passes.inputs.speculation.tree_shape, rates, passes.draft_step, verify)
    nodes = len(tree.parents)
    decoding = _verified(passes, method, tree.seconds - verify(nodes + 1), tree.tokens, nodes)
    return replace(decoding, depth=tree_of(tree.parents).depth)


def _proposal(passes: Passes, method: str) -> tuple[float, int, float]:
    """Return the seconds of a drafted token for the full cache, the method's gamma1, and the token's acceptance."""
    inputs, settings, row = passes.inputs, passes.inputs.speculation, METHODS[method]
    below, step = draft_acceptance(inputs), passes.draft_step()
    if row.middle is None:
        return (0.0, 0, LOOKUP_ACCEPTANCE) if row.drafter == LOOKUP else (step, 0, below)
    published = MIDDLES[settings.middle or row.middle].acceptance
    acceptance = published if inputs.acceptance is None else inputs.acceptance
    if row.drafter is None or settings.draft == "none":
        return passes.retrieval(1) + passes.sample_s, 0, acceptance
    gammas = GAMMAS if settings.gamma1 is None else (settings.gamma1,)
    times = {
        gamma: (gamma * step + passes.retrieval(gamma + 1) + 2 * passes.sample_s) / expected_tokens(below, gamma)
        for gamma in gammas
    }
    best = next(gamma for gamma in gammas if times[gamma] <= EQUAL * min(times.values()))
    return times[best], best, acceptance


def draft_acceptance(inputs: PlanInputs) -> float:
    """Return the rate at which the level above accepts the lowest drafter's tokens."""
    if inputs.draft_acceptance is not None:
        return inputs.draft_acceptance
    if not has_draft_model(inputs.speculation):
        return LOOKUP_ACCEPTANCE
    if isinstance(inputs.draft, HeadDimensions):
        return published_acceptance(inputs.draft.kind, inputs.tokens)
    return DRAFT_ACCEPTANCE


def candidates(inputs: PlanInputs) -> list[str]:
    """Return the methods that `auto` may choose, or the requested one."""
    settings = inputs.speculation
    requested = METHODS[settings.method]
    if not requested.adaptive:
        return [settings.method]
    drafter = drafter_kind(settings)
    drafters = {None, drafter, CHOSEN if drafter else None}
    middles = {None, requested.middle if has_middle(settings, inputs.tokens) else None}
    plain = (row for row in METHODS.values() if not row.adaptive)
    return [row.name for row in plain if row.drafter in drafters and row.middle in middles]


def first_token(passes: Passes) -> Time:
    """Return the time to first token, without loading: the prompt is read, chunks are selected, and one step is run.

    Offloaded KV is copied while the next rows are computed. In chunk order, offloaded weights are read again for every
    chunk, and offloaded KV as far as it is filled: half of it on average.
    """
    inputs, placed, hardware = passes.inputs, passes.placed, passes.inputs.hardware
    chunks, rows = max(inputs.tokens / inputs.prefill_chunk, 1), min(inputs.tokens, inputs.prefill_chunk)
    chunk = passes.linears(rows)
    hosted = chunks * chunk.hosted_experts.seconds(hardware)
    compute = _computing(inputs, chunk, chunks)
    copies_experts = placed.away_layers > 0 and not placed.hosts_experts(rows)
    resources = {
        "link": _copied(passes, chunks, copies_experts) / hardware.link,
        "launches": _launching(passes, chunk, chunks),
        "experts on the host" if hosted > compute else "compute": compute + hosted,
    }
    if placed.uses_disk:  # written once, and read back
        reads = 1 if placed.by_layers else 1 + chunks / 2
        resources["disk"] = passes.on_disk * reads / hardware.disk_rate
    bound = max(resources, key=resources.__getitem__)
    seconds = resources[bound] + passes.full(1)[0].seconds + first_selection(passes)
    return Time(seconds, bound, resources)


def _computing(inputs: PlanInputs, chunk: Pass, chunks: float) -> float:
    """Return the seconds in which the devices compute a prompt; a GPU also dequantises weights for each chunk."""
    shape, hardware, tokens = inputs.shape, inputs.hardware, inputs.tokens
    linear = 2 * shape.active_layer_parameters * tokens - chunks * chunk.hosted_experts.flops
    causal = attention_flops(shape, tokens, tokens) / 2
    seconds = (linear + causal) / hardware.gpus / hardware.flops / COMPUTE
    if inputs.is_quantized and not hardware.shared:  # read, written and read: arithmetic hides reading them once
        moved = shape.layers * (shape.layer_bytes(inputs.bits) + shape.layer_parameters * 2 * inputs.itemsize)
        seconds += chunks * moved / hardware.gpus / hardware.bandwidth / READ
    if hardware.gpus > 1:
        sums = ALL_REDUCE_S * chunks + tokens * shape.hidden * inputs.itemsize / hardware.link
        seconds += 2 * shape.layers * sums
    return seconds


def _copied(passes: Passes, chunks: float, copies_experts: bool) -> float:
    """Return the bytes that come over each device's link while a prompt is read."""
    inputs, placed, shape, gpus = passes.inputs, passes.placed, passes.inputs.shape, passes.inputs.hardware.gpus
    kv = placed.host.parts.get("KV cache", 0) / gpus
    weights = (shape.layers - placed.weight_layers) * shape.layer_bytes(inputs.bits) / gpus
    weights += placed.host.parts.get("experts", 0) / gpus if copies_experts else 0
    if placed.uses_disk:
        kv = 0 if inputs.has_one_memory else kv + placed.disk.parts["KV cache"] / gpus
    return kv + weights if placed.by_layers else kv * (1 + chunks / 2) + weights * chunks


def _launching(passes: Passes, chunk: Pass, chunks: float) -> float:
    """Return the seconds in which a GPU's work for a prompt is launched."""
    shape, hardware, by_layers = passes.inputs.shape, passes.inputs.hardware, passes.placed.by_layers
    if hardware.shared:
        return 0.0
    away = 0 if by_layers else shape.kv_layers - passes.placed.resident_layers
    operations = shape.layers * layer_launches(hardware) + chunk.experts * EXPERT_LAUNCHES + away * AWAY_LAUNCHES
    copying = (1 if by_layers else chunks) * chunk.pages * PAGE_S
    attending = chunks / 2 * away * passes.pages * (passes.page_share * PAGE_S + PAGE_LAUNCHES * LAUNCH_S)
    return chunks * operations * LAUNCH_S + copying + attending


def first_selection(passes: Passes) -> float:
    """Return the seconds of a GPU's first selection of a retrieval cache; 0 without one, and in a CPU's memory.

    From disk all keys are read, for their means, and then the pages of selected chunks: at most all.

    Of resident layers all keys are read. Of offloaded ones mean keys come over the link, which a prefill layer by layer
    has made; otherwise all pages come. The selected chunks are gathered on the host and copied.
    """
    inputs, placed, hardware = passes.inputs, passes.placed, passes.inputs.hardware
    settings, shape, gpus = inputs.speculation, inputs.shape, inputs.hardware.gpus
    if not has_middle(settings, inputs.tokens) or inputs.has_planes:
        return 0.0
    if hardware.shared:
        return 2 * passes.selecting()
    offloaded, growing = 1 - placed.resident_layers / shape.kv_layers, shape.full_attention
    kv, selected = (
        stored_bytes(growing, inputs.kv, tokens, inputs.itemsize) / gpus for tokens in (inputs.tokens, inputs.budget)
    )
    selected *= offloaded
    gathering = gpus * selected * 2 / (GATHER * hardware.host_bandwidth)  # read and written
    seconds = passes.selecting() + selected / hardware.link + gathering
    if placed.by_layers:
        chunk = selected_chunk(settings, BLOCK, tokens=inputs.tokens)
        return seconds + offloaded * kv / 2 / chunk / hardware.link
    launching = shape.kv_layers * passes.pages * (passes.page_share * PAGE_S + 3 * LAUNCH_S)
    return seconds + offloaded * (kv / hardware.link + launching)
