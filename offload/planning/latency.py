"""Latency of a placement: the time between tokens, for each method.

Tokens per verification follow from the acceptance rate (Leviathan et al.,
arXiv 2211.17192), applied to each level in turn (TriForce, arXiv 2404.11912).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..architecture.head_shape import HeadDimensions, published_acceptance
from ..settings.config import LONGEST_GAMMA
from ..settings.method_sizes import TAIL, drafter_kind, has_draft_model, has_middle
from ..settings.methods import CHOSEN, LOOKUP, METHODS, MIDDLES
from ..speculation.passes.estimators import expected_tokens
from .passes import Passes
from .request import PlanRequest
from .roofline import Time

# Used until acceptance is measured; that of middle levels is in methods.py. Of the draft model's tokens of TriForce
# (JackFram/llama-68m) the retrieval level accepts .23 in the authors' runs (ranonrkm/TriForce-legacy); larger draft
# models are accepted more often, so .35 is a guess.
DRAFT_ACCEPTANCE = 0.35
LOOKUP_ACCEPTANCE = 0.3  # n-gram lookup on summaries of books: it drafts at half of the positions, and 60 % is accepted
_NEGLIGIBLE = 1e-9  # probability that a sequence of a batch still drafts
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


def predict(passes: Passes, method: str) -> Decoding:
    """Predict a method's speed, with the requested draft lengths, or the best ones."""
    if not METHODS[method].speculates:
        time, share = passes.full(1)
        seconds = time.seconds + passes.sample_s
        return Decoding(method, replace(time, seconds=seconds), share, seconds)
    requested = passes.request.speculation.gamma2
    proposed, gamma1, acceptance = _proposal(passes, method)
    row = METHODS[method]
    tree = passes.request.speculation.tree_shape
    if tree.kind != "chain" and row.middle is None and row.drafter != LOOKUP:
        return _tree(passes, method, acceptance)
    gammas = GAMMAS if requested is None else (requested,)
    decodings = [_speculative(passes, method, gamma, gamma1, proposed, acceptance) for gamma in gammas]
    shortest = min(decoding.tbt.seconds for decoding in decodings)
    best = next(decoding for decoding in decodings if decoding.tbt.seconds <= EQUAL * shortest)
    near = [decoding.gamma2 for decoding in decodings if decoding.tbt.seconds <= NEARLY * shortest]
    return replace(best, gammas=(min(near), max(near)))


def _speculative(
    passes: Passes, method: str, gamma2: int, gamma1: int, proposed: Callable[[int], float], acceptance: float
) -> Decoding:
    """Predict speculative decoding. Levels do not overlap: while one drafts, the link prefetches only one page."""
    tokens = expected_tokens(acceptance, gamma2)
    drafting = _waiting(passes.request, gamma1, gamma2) * proposed(gamma2) + tokens * _selecting(passes, method)
    found = _verified(passes, method, drafting, tokens, gamma2)
    return replace(found, gamma1=gamma1)


def _verified(passes: Passes, method: str, drafting: float, tokens: float, nodes: int) -> Decoding:
    """Predict decoding where drafting takes so many seconds, and verifying its nodes yields so many tokens."""
    time, share = passes.full(nodes + 1)
    verifying = time.seconds + 2 * passes.sample_s
    resources = {name: seconds / tokens for name, seconds in time.resources.items()}
    bound = time.bound if verifying >= drafting else "drafting"
    tbt = Time((drafting + verifying) / tokens, bound, resources | {"drafting": drafting / tokens})
    return Decoding(method, tbt, share, verifying, drafting, tokens, gamma2=nodes)


def _waiting(request: PlanRequest, gamma1: int, gamma2: int) -> float:
    """Return how much longer drafting takes in lock step, where all sequences wait for the slowest draft."""
    if not (request.static_batch and gamma1):
        return 1.0
    below = draft_acceptance(request)
    alone, slowest = (draft_rounds(below, gamma1, gamma2, count) for count in (1, request.sequences))
    return slowest / alone


def draft_acceptance(request: PlanRequest) -> float:
    """Return the rate at which the level above accepts the lowest drafter's tokens."""
    default = DRAFT_ACCEPTANCE if has_draft_model(request.speculation) else LOOKUP_ACCEPTANCE
    if isinstance(request.draft, HeadDimensions) and has_draft_model(request.speculation):
        default = published_acceptance(request.draft.kind, request.tokens)
    return default if request.draft_acceptance is None else request.draft_acceptance


def _selecting(passes: Passes, method: str) -> float:
    """Return the seconds a token in which the retrieval cache selects by scores; 0 where it does not."""
    middle = METHODS[method].middle
    scores = middle is not None and MIDDLES[passes.request.speculation.middle or middle].scores
    return passes.scoring() / SELECTION_TOKENS if scores else 0.0


def _tree(passes: Passes, method: str, acceptance: float) -> Decoding:
    """Predict decoding with token trees, whose first children are accepted at a rate; a draft step a depth."""
    from ..speculation.trees.best_size import sized_tree  # imports numpy, which takes a tenth of a second
    from ..speculation.trees.drafted_trees import ChildAcceptance
    from ..speculation.trees.tree import tree_of

    def verify(rows: int) -> float:
        return passes.full(rows)[0].seconds + 2 * passes.sample_s

    shape, rates = passes.request.speculation.tree_shape, ChildAcceptance(acceptance).rates(0)
    tree = sized_tree(shape, rates, passes.draft_step, verify)
    nodes = len(tree.parents)
    found = _verified(passes, method, tree.seconds - verify(nodes + 1), tree.tokens, nodes)
    return replace(found, gammas=(nodes, nodes), depth=tree_of(tree.parents).depth)


def _proposal(passes: Passes, method: str) -> tuple[Callable[[int], float], int, float]:
    """Return the seconds of a draft for the full cache by its tokens, its gamma1, and the acceptance of a token."""
    request, settings = passes.request, passes.request.speculation
    below, row = draft_acceptance(request), METHODS[method]
    step = passes.draft_step()

    def chain(tokens: int) -> float:
        return tokens * step

    if row.middle is None:
        return (lambda tokens: 0.0, 0, LOOKUP_ACCEPTANCE) if row.drafter == LOOKUP else (chain, 0, below)
    known = MIDDLES[settings.middle or row.middle].acceptance if request.acceptance is None else request.acceptance
    acceptance = known
    if row.drafter is None or settings.draft == "none":
        each = passes.retrieval(1) + passes.sample_s
        return lambda tokens: tokens * each, 0, acceptance
    gammas = GAMMAS if settings.gamma1 is None else (settings.gamma1,)
    times = {
        gamma: (chain(gamma) + passes.retrieval(gamma + 1) + 2 * passes.sample_s) / expected_tokens(below, gamma)
        for gamma in gammas
    }
    best = next(gamma for gamma in gammas if times[gamma] <= EQUAL * min(times.values()))
    return lambda tokens: tokens * times[best], best, acceptance


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


def draft_rounds(acceptance: float, gamma1: int, gamma2: int, sequences: int) -> float:
    """Return the expected rounds until the slowest of some sequences has drafted `gamma2` tokens.

    A round of the lower level drafts `gamma1` tokens, each accepted at the rate, and emits one more than are accepted.
    """
    emitted = [acceptance**count * (1 - acceptance) for count in range(gamma1)] + [acceptance**gamma1]
    drafting, expected = {0: 1.0}, 0.0  # the probability of each number of tokens below gamma2, of one sequence
    while (unfinished := 1 - (1 - min(sum(drafting.values()), 1.0)) ** sequences) > _NEGLIGIBLE:
        expected += unfinished
        following: dict[int, float] = {}
        for tokens, probability in drafting.items():
            for accepted, chance in enumerate(emitted):
                if (total := tokens + accepted + 1) < gamma2:
                    following[total] = following.get(total, 0.0) + probability * chance
        drafting = following
    return expected
