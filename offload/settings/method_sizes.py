"""Which levels a request's settings need, and the capacities of their caches in tokens.

Shared by the code that runs the levels and the code that estimates their memory. Imports nothing heavy.
"""

from dataclasses import replace

from ..short_repr import short_repr
from ..units import counted
from .config import LEAST_BUDGET, LONGEST_GAMMA, Speculation
from .kv_formats import PLANE_KV
from .methods import CHOSEN, LOOKUP, METHODS, MIDDLES, MODEL, RETRIEVAL
from .tree_settings import MOST_AUTO_NODES
from .validation import require

TAIL = 4 * LONGEST_GAMMA  # tokens in the retrieval cache beside its budget: drafts and the newest tokens
PADDING = 32  # positions behind the tail that recorded passes may write to: they are filled up to a power of two
# Of a sequence: beyond it, chunks grow instead. Their mean keys and scores then take the same memory and time, however
# long it is: of SmolLM2-135M in bf16 180 MiB.
MOST_CHUNKS = 2**14
KEPT_QUERIES = 64  # newest rows of a pass whose queries are kept for selections: more than a verification has
EVICT_EVERY = 128  # tokens after which a cache that forgets drops as many: they are run in one pass of a prompt
SPARE_ROWS = 4 * LONGEST_GAMMA  # hidden rows that are kept for a head beside its window: rejected ones overwrite none
_MIN_RATIO = 1.25  # of the sequence to the retrieval cache: below, the middle level saves too little time


def tree_nodes(settings: Speculation) -> int:
    """Return how many tokens a tree has at most, which are all in the cache at once; 0 without trees."""
    shape = settings.tree_shape
    return MOST_AUTO_NODES if shape.kind == "auto" else shape.nodes or 0


def tail_tokens(settings: Speculation) -> int:
    """Return the tokens in the retrieval cache beside its budget."""
    return TAIL + 2 * tree_nodes(settings)


def selected_chunk(settings: Speculation, grain: int, span: int = 0, tokens: int = 0) -> int:
    """Return how many tokens are selected together: `settings.chunk`, rounded up to what a store can select.

    `grain` tokens of the store can only be selected together; no chunk crosses a multiple of `span`, if there is one.
    A sequence that may reach `tokens` has at most MOST_CHUNKS of them.
    """
    chunk = -(-settings.chunk // grain) * grain
    while tokens > MOST_CHUNKS * chunk:
        chunk *= 2
    while span and span % chunk:
        chunk = min(chunk + grain, span)
    return chunk


def draft_chunk(settings: Speculation) -> int:
    """Return how many tokens a draft model reads in one pass."""
    return max(settings.window, 2 * LONGEST_GAMMA, tree_nodes(settings))


def draft_capacity(settings: Speculation) -> int:
    """Return the capacity of a draft model's cache, in tokens."""
    return settings.sink + 2 * settings.window + 2 * draft_chunk(settings)


def has_middle(settings: Speculation, tokens: int) -> bool:
    """Return whether a sequence that may reach `tokens` gets a retrieval cache."""
    method = METHODS[settings.method]
    if method.adaptive:
        return method.middle is not None and _is_long(settings, tokens)
    return method.middle is not None


def middle_kind(settings: Speculation) -> str | None:
    """Return how the middle level selects chunks: one of methods.MIDDLES, None for a method without that level."""
    kind = METHODS[settings.method].middle
    return kind and (settings.middle or kind)


def drafting_from_planes(settings: Speculation) -> Speculation:
    """Return the settings of a run whose plane A is on the device: a middle level that would select reads that."""
    retrieves = METHODS[settings.method].middle == RETRIEVAL and settings.middle is None
    return replace(settings, middle=PLANE_KV.name) if retrieves else settings


def whole_format(settings: Speculation) -> str | None:
    """Return the format in which the middle level reads all keys and values; None for one that selects, or none."""
    kind = middle_kind(settings)
    return None if kind is None else MIDDLES[kind].whole


def middle_tokens(settings: Speculation, tokens: int) -> int:
    """Return how many tokens' keys and values the middle level reads in a sequence of `tokens`, without its tail."""
    return tokens if whole_format(settings) else min(budget_of(settings, tokens), tokens)


def _is_long(settings: Speculation, tokens: int) -> bool:
    return tokens > _MIN_RATIO * (budget_of(settings, tokens) + TAIL)


def suggested_budget(tokens: int) -> int:
    """Return the retrieval budget for a sequence: 3 % of it, as in the paper, as a power of two; at least LEAST_BUDGET.

    `generate` and `profile` both take it.
    """
    return max(LEAST_BUDGET, 2 ** ((tokens // 32) - 1).bit_length() if tokens >= 64 else LEAST_BUDGET)


def budget_of(settings: Speculation, tokens: int) -> int:
    """Return the budget of the settings, or else one for a sequence that may reach `tokens`."""
    if settings.budget is not None:
        return settings.budget
    budget = settings.kept_tokens if settings.approximate is not None else suggested_budget(tokens)
    return max(budget, 4 * settings.chunk)


def sized(settings: Speculation, tokens: int) -> Speculation:
    """Return the settings with a budget for a sequence that may reach `tokens`, unless they have one."""
    return settings if settings.budget is not None else replace(settings, budget=budget_of(settings, tokens))


def drafter_kind(settings: Speculation) -> str | None:
    """Return the kind of the drafter: methods.LOOKUP, methods.MODEL, or None."""
    kind = METHODS[settings.method].drafter
    if kind != CHOSEN:
        return kind
    if settings.draft_model is not None:
        return MODEL
    return LOOKUP if settings.draft == LOOKUP else None


def has_draft_model(settings: Speculation) -> bool:
    """Return whether a draft model will be used."""
    return drafter_kind(settings) == MODEL


def forgets(settings: Speculation) -> bool:
    """Return whether the target runs on a cache of constant size, which forgets tokens: any prompt fits."""
    return settings.approximate is not None


def forgetting_capacity(settings: Speculation) -> int:
    """Return the most tokens that a cache which forgets attends to; positions are below that."""
    return settings.kept_tokens + min(EVICT_EVERY, settings.kept_tokens)


def check_forgetting(settings: Speculation, context: int) -> None:
    """Raise SettingsError if a cache that forgets would have positions beyond a model's `context`."""
    capacity, kept = forgetting_capacity(settings), settings.kept_tokens
    require(
        capacity <= context,
        f"a budget of {kept:,} tokens, and {capacity - kept} until the next eviction, exceed the "
        f"model's context of {context:,}",
        f"use --budget {max(context - EVICT_EVERY, context // 2)} or less",
    )


def check_approximate(settings: Speculation, family: str, has_kinds: bool) -> None:
    """Raise SettingsError if a target, some of whose layers do not attend to all tokens, is to decode approximately."""
    require(
        settings.approximate is None or not has_kinds,
        f"--approximate {settings.approximate} does not work with {family}: not all of its layers attend to all tokens",
        "leave --approximate out",
    )


def check_middle(settings: Speculation, in_planes: bool) -> None:
    """Raise SettingsError for a middle level that reads plane A where keys and values do not lie in planes."""
    if whole_format(settings) == PLANE_KV.name:
        flag = f"--middle {settings.middle}"
        require(in_planes, f"{flag} reads what --offload planes has on the device", "use that, or leave --middle out")


def check_trees(settings: Speculation, has_linear_layers: bool, vocab: int) -> None:
    """Raise SettingsError if drafts are to be trees where the target, or the draft model, has linear attention.

    Also if a node may have more children than there are tokens in the vocabulary: all of them differ.
    """
    require(
        settings.tree == "chain" or not has_linear_layers,
        f"--tree {settings.tree} does not work with linear attention, whose states follow one path",
        "leave --tree out",
    )
    children = settings.tree_shape.most_children
    require(
        children <= vocab,
        f"tree is {short_repr(settings.tree)}, with up to {children:,} children of a node, all different, and the "
        f"model has {counted(vocab, 'token')}",
        f"use widths of {vocab:,} at most, such as k-ary:{vocab}",
    )


def stored_tokens(settings: Speculation, tokens: int) -> int:
    """Return how many tokens' keys and values the target's cache takes memory for, in a sequence of `tokens`."""
    return 2 * forgetting_capacity(settings) if forgets(settings) else tokens  # rotated, and before RoPE
