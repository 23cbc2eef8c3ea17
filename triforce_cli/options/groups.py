"""Groups of options, and a decorator that adds them to a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from . import declarations as options

PLACEMENT = {
    "offload": options.Offload,
    "memory": options.Memory,
    "host_memory": options.HostMemory,
    "resident_layers": options.ResidentLayers,
    "host_share": options.HostShare,
    "link_gb_s": options.LinkRate,
    "experts": options.ExpertsWay,
    "expert_layers": options.ExpertLayers,
    "disk": options.Disk,
    "disk_limit": options.DiskLimit,
}
TREES = {"tree": options.Tree, "tree_sampling": options.TreeDraws}
CACHE = {"cache": options.Cache, "cache_limit": options.CacheLimit}
PARALLEL = {"tensor_parallel": options.TensorParallel, "join_timeout": options.JoinTimeout}

# The options of every command that generates text. `settings.given_options` and `request.parse_request` read them.
GENERATION = {
    "model": options.Model,
    "max_new_tokens": options.MaxNewTokens,
    "temperature": options.Temperature,
    "system": options.System,
    "stop": options.Stop,
    "seed": options.Seed,
    "json": options.Json,
    "quiet": options.Quiet,
    "verbose": options.Verbose,
    "top_p": options.TopP,
    "top_k": options.TopK,
    "min_p": options.MinP,
    "repetition_penalty": options.RepetitionPenalty,
    "frequency_penalty": options.FrequencyPenalty,
    "presence_penalty": options.PresencePenalty,
    "dry_multiplier": options.DryMultiplier,
    "dry_base": options.DryBase,
    "dry_allowed_length": options.DryAllowedLength,
    "dry_range": options.DryRange,
    "no_repeat_ngram": options.NoRepeatNgram,
    "coupled": options.Coupled,
    "method": options.Method,
    "draft": options.Draft,
    "middle": options.Middle,
    "sink": options.Sink,
    "window": options.Window,
    "budget": options.Budget,
    "chunk": options.Chunk,
    "retrieval_kv": options.RetrievalKv,
    "rebuild_every": options.RebuildEvery,
    "gamma1": options.Gamma1,
    "gamma2": options.Gamma2,
    **TREES,
    "verify": options.Verify,
    "raw": options.Raw,
    "think": options.Think,
    "show_thinking": options.ShowThinking,
    "extend_context": options.ExtendContext,
    **CACHE,
    **PLACEMENT,
    "approximate": options.Approximate,
    "kv": options.Kv,
    "dry_run": options.DryRun,
    "profile": options.ProfileName,
    "device": options.Device,
    "dtype": options.Dtype,
    "kernel": options.Kernel,
    "quantize": options.Quantize,
    "threads": options.Threads,
    "prefill_chunk": options.PrefillChunk,
    **PARALLEL,
    "show_config": options.ShowConfig,
}

# Of the commands that read documents once, and may leave a part of a long one out.
READING = GENERATION | {"encoding": options.Encoding, "truncate": options.Truncate}


def accepts(options: dict[str, Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds options to a command, which reads them from its context and not as arguments."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def run(*args: Any, **kwargs: Any) -> Any:
            return command(*args, **{name: value for name, value in kwargs.items() if name not in options})

        own = inspect.signature(command, eval_str=True)
        kind = inspect.Parameter.KEYWORD_ONLY
        added = [
            inspect.Parameter(name, kind, default=False if each.__origin__ is bool else None, annotation=each)
            for name, each in options.items()
        ]
        run.__signature__ = own.replace(parameters=[*own.parameters.values(), *added])
        run.__annotations__ = {each.name: each.annotation for each in run.__signature__.parameters.values()}
        return run

    return decorate
