"""How long an answer may be behind a prompt, within a model's context."""

from __future__ import annotations

from ..errors import PromptError
from ..units import counted
from .config import ModelShape
from .yarn import beyond_dual_chunk, stretch_error


def new_tokens_in_context(shape: ModelShape, prompt_tokens: int, wanted: int, exact: bool) -> int:
    """Return how many tokens may follow the prompt: `wanted`, or unless `exact` what fits into the context.

    Raises PromptError with the numbers if the prompt exceeds the context, or with `exact` prompt and answer do.
    """
    context = shape.context
    limit = f"the model's context of {counted(context, 'token')}"
    if shape.sliding_window == context:
        limit += " (its sliding window)"
    if shape.dual_chunk == context and prompt_tokens + (wanted if exact else 1) > context:
        raise beyond_dual_chunk(counted(prompt_tokens, "prompt token") + " and the answer do not fit", context)
    extend = "--extend-context, " if stretch_error(shape) is None else ""
    if prompt_tokens >= context:
        raise PromptError(
            f"the prompt has {counted(prompt_tokens, 'token')}, which leaves no room in {limit}",
            f"use `triforce summarize --map-reduce`, {extend}or --model with a longer context",
        )
    if exact and prompt_tokens + wanted > context:
        raise PromptError(
            f"{counted(prompt_tokens, 'prompt token')} and {counted(wanted, 'new one')} exceed {limit}",
            f"use --max-new-tokens {context - prompt_tokens} or fewer, {extend}or shorten the prompt",
        )
    return min(wanted, context - prompt_tokens)
