"""Latency of a placement: time to first token, and time between tokens for each method.

Passes are timed by roofline.py. Tokens per verification follow from the acceptance rate (Leviathan et al.,
arXiv 2211.17192), applied to each level in turn (TriForce, arXiv 2404.11912).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..architecture.dims import Dimensions
from ..architecture.footprint import page_tokens
from ..architecture.kv_formats import stored_bytes
from ..architecture.parameters import WeightBits
from ..config import EXACT, LONGEST_GAMMA
from ..hardware.rates import READ
from ..levels import TAIL, drafter_kind, has_draft_model, has_middle
from ..methods import CHOSEN, LOOKUP, METHODS, STREAMING
from ..speculation.estimators import expected_tokens
from .lock_step import draft_rounds
from .placement import Placed
from .request import PlanRequest
from .roofline import KV_RATES, SAMPLE_S, Pass, Time, pass_time, quantized_rows
from .self_draft import best_level, bits_at, relative_costs, typical_agreements

# Used until acceptance is measured. TriForce reports "above 0.9 even when the temperature is 1.0" with 4K of 122K
# tokens (its project page); of its draft model's tokens (JackFram/llama-68m) the retrieval level accepts about .35.
RETRIEVAL_ACCEPTANCE = 0.9
DRAFT_ACCEPTANCE = 0.35
LOOKUP_ACCEPTANCE = 0.3  # n-gram lookup on summaries of books: it drafts at half of the positions, and 60 % is accepted
SHARES = 64  # steps of the search for the host's share
EQUAL = 1.01  # within this factor of the best time, predictions cannot tell drafts apart: the shortest is chosen
NEARLY = 1.05  # within this factor of the best time, a draft length is still worth trying
SELECTION_TOKENS = TAIL // 2  # after about so many, the retrieval cache selects again
GAMMAS = range(1, LONGEST_GAMMA + 1)


@dataclass(frozen=True, slots=True)
class Decoding:
    """A decoding method with its predicted speed.

    `tbt` is the time between tokens, of each sequence where several run together. `host_share` is the fraction of the
    KV that is not resident to which the host attends. gamma1 and gamma2 are the tokens drafted for a verification (0:
    no such level), and `gammas` is the range of gamma2 worth trying. `verify_s` and `draft_s` are the seconds of one
    verification and of the drafting before it. gamma2 counts the nodes of a tree, and `depth` is the tree's; 0 for a
    chain.
    """

    method: str
    tbt: Time
    host_share: float
    verify_s: float
    draft_s: float = 0.0
    tokens_per_verification: float = 1.0
    gamma1: int = 0
    gamma2: int = 0
    gammas: tuple[int, int] = (0, 0)
    depth: int = 0


class Passes:
    """Passes of a placed request, each timed once.

    A pass is over so many `rows` of each sequence; all of the request's take part in it, at the same level.
    """

    def __init__(self, request: PlanRequest, placed: Placed) -> None:
        self.request, self.placed = request, placed
        self._sample = SAMPLE_S[request.hardware.device] * (1 if request.static_batch else request.sequences)
        page = page_tokens(request.shape.share(request.hardware.gpus), request.itemsize)
        self.pages = -(-request.tokens // page)  # of an offloaded layer
        self._full: dict[int, tuple[Time, float]] = {}
        # Of the weights that the retrieval cache is read with: their bits if they are a copy, and how often they choose
        # the token of the model's own.
        self._drafting_bits, self._agreement = self._drafting_weights()

    def _drafting_weights(self) -> tuple[WeightBits | None, float]:
        request, shape = self.request, self.request.shape
        if request.copy_bits is None:
            return None, 1.0
        agreements, budget = typical_agreements(shape), request.speculation.budget
        hardware = request.hardware
        source = hardware.disk_rate if self.placed.uses_disk else hardware.link
        kv_cost = hardware.bandwidth / source if self._streams_kv else 1.0
        costs = relative_costs(shape, shape.read_bytes(request.bits), request.itemsize, request.tokens, budget, kv_cost)
        level = request.speculation.self_level or best_level(agreements, costs)
        return bits_at(shape, level), agreements[level]

    @property
    def _streams_kv(self) -> bool:
        return self.placed.resident_layers < self.request.shape.kv_layers

    def full(self, rows: int) -> tuple[Time, float]:
        """Return the time of a target pass over the full cache, and the host's share with which it is fastest."""
        if rows not in self._full:
            times = [
                (pass_time(self._full_pass(rows, share), self.request.hardware), share) for share in self._shares()
            ]
            self._full[rows] = min(times, key=lambda pair: pair[0].seconds)
        return self._full[rows]

    def _shares(self) -> list[float]:
        placement, placed = self.request.placement, self.placed
        asked = placement.offload != "auto" or placement.host_share is not None
        # Beside a simulated link the host's cores are the device's, and converting codes keeps them busy.
        converts = self.request.kv != EXACT and self.request.hardware.shared
        streams = placement.offload == "stream" or (converts and not asked)
        if streams or placed.uses_disk or placed.resident_layers == self.request.shape.kv_layers:
            return [0.0]
        if placement.offload == "host":
            return [1.0]
        return [n / SHARES for n in range(SHARES + 1)] if placement.host_share is None else [placement.host_share]

    def _full_pass(self, rows: int, share: float) -> Pass:
        request, shape = self.request, self.request.shape
        count, gpus = request.sequences, request.hardware.gpus
        windows = count * shape.window_bytes(request.tokens, request.itemsize)
        each = (count * request.kv_bytes(request.tokens) - windows) / shape.kv_layers
        layers, (grown_reads, window_reads) = shape.kv_layers - self.placed.resident_layers, shape.kv_reads
        kv = windows * window_reads + each * shape.kv_layers * grown_reads + count * shape.moved_state_bytes
        again = shape.borrowing[0] if layers else 0  # layers that read the last one's, which is offloaded
        offloaded = each * (layers + again)
        copied = 0.0 if request.has_one_memory else offloaded
        hosted = share * offloaded
        scoring = count * attention_flops(shape, request.tokens, rows)
        base = self.linears(rows)
        return replace(
            base,
            kv=(kv - hosted) / gpus,
            kv_rate=KV_RATES[request.kv],
            copied=base.copied + max(copied - hosted, 0) / gpus,
            disk=self.on_disk * (1 + again / self.placed.disk_layers) if self.on_disk else 0.0,
            hosted=hosted,
            attention_flops=scoring * (1 - hosted / kv) / gpus,
            hosted_flops=scoring * hosted / kv,
            graphed=base.graphed and not offloaded and (request.hardware.shared or request.kv == EXACT),
            pages=base.pages + (1 - share) * (layers + again) * count * self.pages,
            folded_layers=count * (layers + again) if hosted else 0,
        )

    def linears(self, rows: int) -> Pass:
        """Return the target's linear layers; weights that are not resident are copied over the link."""
        request, shape, placed = self.request, self.request.shape, self.placed
        work = _linears(shape, request, rows, request.hardware.gpus, shape.layers - placed.weight_layers)
        return with_experts_away(work, request, placed)

    def retrieval(self, rows: int) -> float:
        """Return the seconds of a target pass over the retrieval cache."""
        request, shape, gpus = self.request, self.request.shape, self.request.hardware.gpus
        budget, count = min(request.speculation.budget, request.tokens), request.sequences
        kind = request.speculation.retrieval_kv
        offloaded = shape.kv_layers - self.placed.resident_layers
        if kind == EXACT and request.in_place(offloaded):  # else it has copies, which are not quantised
            kind = request.kv
        grown_reads, window_reads = shape.kv_reads
        fixed = window_reads * shape.window_bytes(request.tokens, request.itemsize) + shape.moved_state_bytes
        kv = count * (fixed + grown_reads * stored_bytes(shape.growing, kind, budget, request.itemsize))
        scoring = count * attention_flops(shape, budget, rows)
        bits = self._drafting_bits
        linears = self.linears(rows) if bits is None else _linears(shape, request, rows, gpus, 0, bits)
        work = replace(linears, kv=kv / gpus, kv_rate=KV_RATES[kind], attention_flops=scoring / gpus)
        return pass_time(work, request.hardware).seconds

    @property
    def on_disk(self) -> float:
        """Return the bytes of KV on disk, of all tokens of all sequences."""
        request, placed = self.request, self.placed
        share = placed.disk_layers / request.shape.kv_layers
        return (
            share
            * request.sequences
            * stored_bytes(request.shape.growing, request.kv, request.tokens, request.itemsize)
        )

    def scoring(self) -> float:
        """Return the seconds in which a selection reads the keys of a GPU's resident layers; a CPU keeps mean keys.

        They are those of all sequences. From disk, new chunks are read page by page: at most all of it.
        """
        request, hardware = self.request, self.request.hardware
        reading = self.on_disk / hardware.disk_rate if self.on_disk else 0.0
        if hardware.shared:
            return reading
        resident = self.placed.resident_layers / request.shape.kv_layers
        kv = request.sequences * request.shape.growing.kv_bytes(request.tokens, request.itemsize)
        keys = resident * kv / 2 / hardware.gpus
        return reading + keys / hardware.bandwidth / READ

    def draft_step(self, rows: int = 1) -> float:
        """Return the seconds of a step of the draft model, which each device has whole; 0 for lookup."""
        request, settings = self.request, self.request.speculation
        if request.draft is None or not has_draft_model(settings):
            return 0.0
        work = _linears(request.draft, request, rows, 1, 0)
        room = request.sequences * (settings.sink + settings.window)
        work = replace(work, kv=request.draft.kv_bytes(room, request.itemsize))
        return pass_time(work, replace(request.hardware, gpus=1)).seconds + self._sample

    def decode(self, method: str) -> Decoding:
        """Predict a method's speed, with the requested draft lengths, or the best ones."""
        if not METHODS[method].speculates:
            time, share = self.full(1)
            seconds = time.seconds + self._sample
            return Decoding(method, replace(time, seconds=seconds), share, seconds)
        requested = self.request.speculation.gamma2
        token, gamma1, acceptance = self._proposed_token(method)
        row = METHODS[method]
        if self.request.speculation.tree_shape.kind != "chain" and row.middle is None and row.drafter != LOOKUP:
            return self._tree(method, acceptance)
        gammas = GAMMAS if requested is None else (requested,)
        decodings = [self._speculative(method, gamma, gamma1, token, acceptance) for gamma in gammas]
        shortest = min(decoding.tbt.seconds for decoding in decodings)
        best = next(decoding for decoding in decodings if decoding.tbt.seconds <= EQUAL * shortest)
        near = [decoding.gamma2 for decoding in decodings if decoding.tbt.seconds <= NEARLY * shortest]
        return replace(best, gammas=(min(near), max(near)))

    def _speculative(self, method: str, gamma2: int, gamma1: int, token: float, acceptance: float) -> Decoding:
        """Predict speculative decoding. Levels do not overlap: while one drafts, the link prefetches only one page."""
        time, share = self.full(gamma2 + 1)
        tokens = expected_tokens(acceptance, gamma2)
        selecting = self.scoring() * tokens / SELECTION_TOKENS if self._selects_by_score(method) else 0.0
        token *= self._waiting(gamma1, gamma2)
        drafting, verifying = gamma2 * token + selecting, time.seconds + 2 * self._sample
        resources = {name: seconds / tokens for name, seconds in time.resources.items()}
        bound = time.bound if verifying >= drafting else "drafting"
        tbt = Time((drafting + verifying) / tokens, bound, resources | {"drafting": drafting / tokens})
        return Decoding(method, tbt, share, verifying, drafting, tokens, gamma1, gamma2)

    def _waiting(self, gamma1: int, gamma2: int) -> float:
        """Return how much longer drafting takes in lock step, where all sequences wait for the slowest draft."""
        if not (self.request.static_batch and gamma1):
            return 1.0
        below = self._draft_acceptance
        alone, slowest = (draft_rounds(below, gamma1, gamma2, count) for count in (1, self.request.sequences))
        return slowest / alone

    @property
    def _draft_acceptance(self) -> float:
        """Return the rate at which the level above accepts the lowest drafter's tokens."""
        request = self.request
        default = DRAFT_ACCEPTANCE if has_draft_model(request.speculation) else LOOKUP_ACCEPTANCE
        return default if request.draft_acceptance is None else request.draft_acceptance

    def _selects_by_score(self, method: str) -> bool:
        middle = METHODS[method].middle
        return middle is not None and (self.request.speculation.middle or middle) != STREAMING

    def _tree(self, method: str, acceptance: float) -> Decoding:
        """Predict decoding with token trees, whose first children are accepted at a rate; a draft step a depth."""
        from ..speculation.tree import tree_of
        from ..speculation.tree_estimators import ChildAcceptance
        from ..speculation.tree_size import sized_tree  # imports numpy, which takes a tenth of a second

        def verify(rows: int) -> float:
            return self.full(rows)[0].seconds + 2 * self._sample

        shape, rates = self.request.speculation.tree_shape, ChildAcceptance(acceptance).rates(0)
        tree = sized_tree(shape, rates, self.draft_step, verify)
        nodes, (time, share) = len(tree.parents), self.full(len(tree.parents) + 1)
        verifying = verify(nodes + 1)
        drafting = tree.seconds - verifying
        resources = {name: seconds / tree.tokens for name, seconds in time.resources.items()}
        bound = time.bound if verifying >= drafting else "drafting"
        tbt = Time(tree.token_s, bound, resources | {"drafting": drafting / tree.tokens})
        return Decoding(
            method, tbt, share, verifying, drafting, tree.tokens, 0, nodes, (nodes, nodes), tree_of(tree.parents).depth
        )

    def _proposed_token(self, method: str) -> tuple[float, int, float]:
        """Return the seconds per token drafted for the full cache, its gamma1, and the acceptance of such tokens."""
        request, settings = self.request, self.request.speculation
        below, row = self._draft_acceptance, METHODS[method]
        if row.middle is None:
            return (0.0, 0, LOOKUP_ACCEPTANCE) if row.drafter == LOOKUP else (self.draft_step(), 0, below)
        acceptance = self._agreement * (RETRIEVAL_ACCEPTANCE if request.acceptance is None else request.acceptance)
        if row.drafter is None or settings.draft == "none":
            return self.retrieval(1) + self._sample, 0, acceptance
        each, gammas = self.draft_step(), GAMMAS if settings.gamma1 is None else (settings.gamma1,)
        times = {
            gamma: (gamma * each + self.retrieval(gamma + 1) + 2 * self._sample) / expected_tokens(below, gamma)
            for gamma in gammas
        }
        best = next(gamma for gamma in gammas if times[gamma] <= EQUAL * min(times.values()))
        return times[best], best, acceptance


def _linears(
    shape: Dimensions, request: PlanRequest, rows: int, gpus: int, streamed: int, bits: WeightBits | None = None
) -> Pass:
    """Return a pass over `rows` of each sequence without attention, with `streamed` layers' weights in host memory.

    It is a CUDA graph on a single GPU that has all weights, if its kernels are those of one sequence. `bits` are those
    of the weights, if not the model's own.
    """
    if bits is None:
        bits = request.bits if shape is request.shape else WeightBits.of_dtype(request.itemsize)
    quantized = bits.is_quantized(request.itemsize) and request.hardware.device == "cuda"
    rows *= request.sequences
    operations = 2 * shape.read_parameters * (quantized_rows(rows) if quantized else rows)
    return Pass(
        rows=rows,
        layers=shape.layers,
        row_bytes=shape.hidden * request.itemsize,
        weights=shape.read_bytes(bits, rows) / gpus,
        kv=0.0,
        copied=streamed * shape.layer_bytes(bits) / gpus,
        hosted=0.0,
        linear_flops=operations / gpus,
        attention_flops=0.0,
        hosted_flops=0.0,
        graphed=_is_graphed(shape, request, streamed),
        pages=streamed,
        quantized=quantized,
        sequences=request.sequences,
        experts=shape.experts.distinct(rows) * shape.experts.layers if shape.experts else 0.0,
    )


def with_experts_away(work: Pass, request: PlanRequest, placed: Placed) -> Pass:
    """Return a pass of the target with the experts that lie in host memory, as the placement runs them."""
    if not placed.away_layers:
        return work
    experts, gpus = request.shape.experts, request.hardware.gpus
    each, layers = request.shape.expert_bytes(request.bits) / experts.count, placed.away_layers
    run = experts.distinct(work.rows) * layers
    if placed.experts == "host":
        operations = 2 * request.shape.expert_parameters * experts.per_token * work.rows * layers
        return replace(
            work,
            weights=work.weights - run * each / gpus,
            linear_flops=work.linear_flops - operations / gpus,
            experts=work.experts - run,
            hosted_weights=run * each,
            hosted_experts=run * gpus,
            hosted_expert_flops=operations,
            hosted_layers=layers,
        )
    if experts.reads_all(work.rows):
        whole = experts.count * layers
        return replace(work, copied=work.copied + whole * each / gpus, pages=work.pages + whole)
    return replace(work, chosen=run * each / gpus, pages=work.pages + run)


def _is_graphed(shape: Dimensions, request: PlanRequest, streamed: int) -> bool:
    """Return whether passes are CUDA graphs: not with experts, chosen by the tokens, or with linear attention."""
    is_fixed = not streamed and shape.experts is None and shape.linear is None
    return request.hardware.gpus == 1 and is_fixed and (request.static_batch or request.sequences == 1)


def attention_flops(shape: Dimensions, tokens: int, rows: int) -> float:
    """Return the floating-point operations of attention: two for q . k and two for p . v."""
    return 4.0 * shape.attention_products(tokens) * rows


def candidates(request: PlanRequest) -> list[str]:
    """Return the methods that `auto` may choose, or the requested one."""
    settings = request.speculation
    requested = METHODS[settings.method]
    if not requested.adaptive:
        return [settings.method]
    drafter = drafter_kind(settings)
    drafters = {None, drafter, CHOSEN if drafter else None}
    middles = {None, requested.middle if has_middle(settings, request.tokens) else None}
    plain = (row for row in METHODS.values() if not row.adaptive)
    return [row.name for row in plain if row.drafter in drafters and row.middle in middles]
