"""The options that commands share, each with its environment variable; defaults are read from the dataclasses."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

import typer

from offload.config import DEVICES, DRAFTS, DTYPES, GROUPS, KERNELS, METHODS, OFFLOADS
from offload.units import parse_size, parse_tokens

_DEFAULTS = {f.name: f.default for group in GROUPS for f in fields(group)}


def _setting(name: str, help: str, default: str | None = None, *names: str, **rest: Any) -> Any:
    """Return an option with the setting's flag and environment variable; `default` describes it, else it is shown."""
    show_default = default or str(_DEFAULTS[name])
    flags = names or (f"--{name.replace('_', '-')}",)
    return typer.Option(*flags, envvar=f"TRIFORCE_{name.upper()}", help=help, show_default=show_default, **rest)


def _complete_model(incomplete: str) -> list[str]:
    from offload.loading.registry import EMBEDDED, HUB_MODELS

    return [name for name in (*EMBEDDED, *HUB_MODELS) if name.lower().startswith(incomplete.lower())]


def complete_profile(incomplete: str) -> list[str]:
    from offload.hardware.profiles import available

    return [name for name in available() if name.startswith(incomplete)]


def _complete_from(*names: str) -> Any:
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


_MODELS_ELSE = "the model's, else {}"


def model_option(default: str | None = None) -> Any:
    """Return the option --model; `default` describes a command's own default."""
    help = "A folder (config.json + safetensors), a .gguf file, a hub id, or a name such as Llama-3.1-8B."
    return _setting("model", help, default, "--model", "-m", autocompletion=_complete_model)


Model = Annotated[str | None, model_option()]
Device = Annotated[str | None, _setting("device", "Where to run.", autocompletion=_complete_from(*DEVICES))]
Dtype = Annotated[
    str | None,
    _setting("dtype", "Type of weights and KV cache; auto is bfloat16.", autocompletion=_complete_from(*DTYPES)),
]
Kernel = Annotated[
    str | None,
    _setting(
        "kernel",
        "Level of the native kernel on a CPU: avx512, avx2 or portable; auto is the best, off is torch alone.",
        autocompletion=_complete_from(*KERNELS),
    ),
]
Threads = Annotated[int | None, _setting("threads", "CPU threads.", "all cores")]
PrefillChunk = Annotated[int | None, _setting("prefill_chunk", "Tokens run at once while reading the prompt.")]

Temperature = Annotated[
    float | None,
    _setting("temperature", "0 is plain greedy; higher is more varied.", _MODELS_ELSE.format(_DEFAULTS["temperature"])),
]
TopP = Annotated[
    float | None,
    _setting("top_p", "Keep the likeliest tokens up to this sum.", _MODELS_ELSE.format(_DEFAULTS["top_p"])),
]
TopK = Annotated[int | None, _setting("top_k", "Keep this many of the likeliest tokens.", _MODELS_ELSE.format("off"))]
MinP = Annotated[
    float | None,
    _setting("min_p", "Keep tokens at least this likely relative to the likeliest.", _MODELS_ELSE.format("off")),
]
RepetitionPenalty = Annotated[
    float | None,
    _setting("repetition_penalty", "Above 1, tokens that occurred become less likely.", _MODELS_ELSE.format("off")),
]
FrequencyPenalty = Annotated[
    float | None,
    _setting(
        "frequency_penalty", "Lower tokens of the output by this for each occurrence.", _MODELS_ELSE.format("off")
    ),
]
PresencePenalty = Annotated[
    float | None,
    _setting("presence_penalty", "Lower tokens of the output by this once.", _MODELS_ELSE.format("off")),
]
DryMultiplier = Annotated[
    float | None,
    _setting("dry_multiplier", "Lower tokens that would extend a repetition (DRY).", _MODELS_ELSE.format("off")),
]
DryBase = Annotated[
    float | None,
    _setting("dry_base", "DRY grows by this with each repeated token.", _MODELS_ELSE.format(_DEFAULTS["dry_base"])),
]
DryAllowedLength = Annotated[
    int | None,
    _setting(
        "dry_allowed_length",
        "DRY begins after this many repeated tokens.",
        _MODELS_ELSE.format(_DEFAULTS["dry_allowed_length"]),
    ),
]
DryRange = Annotated[
    int | None,
    _setting("dry_range", "DRY looks at this many of the latest tokens; 0 is all.", _MODELS_ELSE.format("all")),
]
NoRepeatNgram = Annotated[
    int | None,
    _setting("no_repeat_ngram", "Forbid n-grams of this size to occur twice.", _MODELS_ELSE.format("off")),
]
Seed = Annotated[int | None, _setting("seed", "Seed of the random draws.", "drawn and reported")]
MaxNewTokens = Annotated[
    int | None,
    _setting("max_new_tokens", "Stop after this many tokens.", None, "--max-new-tokens", "-n"),
]
AnswerTokens = Annotated[
    int | None,
    _setting("max_new_tokens", "Stop after this many tokens.", "by the length", "--max-new-tokens", "-n"),
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", help="End before this text; repeatable. Never printed.", show_default=False),
]

Method = Annotated[
    str | None,
    _setting("method", "Method of decoding; all are lossless.", autocompletion=_complete_from(*METHODS)),
]
Draft = Annotated[
    str | None,
    _setting(
        "draft",
        "Drafter: lookup (repeated text), none, or a model.",
        autocompletion=_complete_from(*DRAFTS),
    ),
]
Sink = Annotated[int | None, _setting("sink", "First tokens that small caches always keep.")]
Window = Annotated[int | None, _setting("window", "Latest tokens that a draft model sees.")]
Budget = Annotated[int | None, _setting("budget", "Tokens in the retrieval cache.")]
Chunk = Annotated[int | None, _setting("chunk", "Tokens that are retrieved together.")]
RebuildEvery = Annotated[
    int | None, _setting("rebuild_every", "Retrieve again after this many tokens.", "when acceptance falls")
]
Gamma1 = Annotated[int | None, _setting("gamma1", "Tokens drafted for the retrieval level.", "adaptive")]
Gamma2 = Annotated[int | None, _setting("gamma2", "Tokens drafted for a full verification.", "adaptive")]

Offload = Annotated[
    str | None,
    _setting(
        "offload",
        "How KV in host memory is attended to: none, stream, host or hybrid; auto takes the plan's choice.",
        autocompletion=_complete_from(*OFFLOADS),
    ),
]
_SIZE = {"parser": parse_size, "metavar": "SIZE"}
Memory = Annotated[int | None, _setting("memory", "Device memory to use, such as 22GiB.", "what is free", **_SIZE)]
HostMemory = Annotated[
    int | None,
    _setting("host_memory", "Host memory to use, such as 64GiB.", "what is free", **_SIZE),
]
ResidentLayers = Annotated[
    int | None, _setting("resident_layers", "Layers whose KV stays on the device.", "as many as fit")
]
HostShare = Annotated[
    float | None,
    _setting("host_share", "Part of the other KV that the host attends to, 0 to 1.", "so that both end together"),
]
LinkRate = Annotated[
    float | None,
    _setting("link_gb_s", "Simulated link in GB/s, on a CPU.", "none", "--link", metavar="GB/S"),
]
Cache = Annotated[
    bool | None,
    typer.Option(
        "--cache/--no-cache",
        envvar="TRIFORCE_CACHE",
        help="Save the prompt's KV on disk, and reuse what is saved.",
        show_default="prompts over 2,000 tokens",
    ),
]
CacheLimit = Annotated[
    int | None,
    _setting("cache_limit", "Disk for prompts; removes the least recently used.", "20GiB", **_SIZE),
]
TensorParallel = Annotated[
    int | None,
    _setting("tensor_parallel", "Split the model among this many GPUs, or processes.", "the profile's GPUs"),
]
JoinTimeout = Annotated[float | None, _setting("join_timeout", "Time to wait for the other ranks.", metavar="SECONDS")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan, and load nothing.")]
ContextLength = Annotated[
    int | None,
    typer.Option(
        "--context",
        help="Prompt and answer in tokens, such as 128K.",
        show_default="the model's, 128K at most",
        parser=parse_tokens,
        metavar="TOKENS",
    ),
]

ProfileName = Annotated[
    str | None,
    typer.Option(
        "--profile",
        envvar="TRIFORCE_PROFILE",
        help="A profile's name, or a YAML file.",
        show_default="by the hardware found",
        autocompletion=complete_profile,
    ),
]
PromptFiles = Annotated[
    list[str] | None,
    typer.Option(
        "--prompt-file", "-f", help="Read the prompt from a file; repeatable; - is stdin.", show_default=False
    ),
]
System = Annotated[str | None, typer.Option(help="A system message for the chat template.", show_default=False)]
Raw = Annotated[bool, typer.Option("--raw", help="Continue the text unchanged, without the chat template.")]
Verify = Annotated[bool, typer.Option("--verify", help="Decode again plainly, and compare. Greedy decoding only.")]
ExtendContext = Annotated[
    bool,
    typer.Option("--extend-context", help="Stretch a context that is too short by YaRN; answers get worse."),
]
Json = Annotated[bool, typer.Option("--json", help="JSON lines on stdout instead of text.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No statistics and no progress, only the text.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Also print the resolved settings, and where they came from.")
]
