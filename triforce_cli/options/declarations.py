"""The options that commands share, each with its environment variable; defaults are read from the dataclasses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, Any

import typer

from offload.errors import SettingsError
from offload.settings.config import DEVICES, DRAFTS, DTYPES, GROUPS, KERNELS, METHODS, QUANTIZE
from offload.settings.generation import COUPLED, FASTEST, parse_sampling
from offload.settings.kv_formats import EXACT, KV_FORMATS, LOSSY_KV
from offload.settings.methods import APPROXIMATIONS, MIDDLES
from offload.settings.placement_settings import EXPERTS, OFFLOADS
from offload.settings.tree_settings import TREE_SAMPLINGS
from offload.short_repr import short_repr
from offload.units import parse_size, parse_tokens

from ..input.encoding import encoding_named

AUTO = "auto"
_MOST_PARALLEL = 1024


def parse_parallel(text: str | int) -> int | str:
    """Return a number of sequences, or "auto". Raises SettingsError."""
    given = str(text).strip().lower()
    if given == AUTO:
        return AUTO
    if not re.fullmatch("[0-9]{1,4}", given) or not 1 <= int(given) <= _MOST_PARALLEL:
        hint = f"give a number of sequences from 1 to {_MOST_PARALLEL:,}, or auto"
        raise SettingsError(f"--parallel is {short_repr(text)}", hint)
    return int(given)


_DEFAULTS = {f.name: f.default for group in GROUPS for f in fields(group)}


SAMPLING, SPECULATION, CONTEXT = "Sampling", "Speculative decoding", "Prompt and prompt cache"
MEMORY, MACHINE = "Memory and offloading", "Machine"
BATCH = "Many prompts"
# The panel of each setting in the help; the others, which everybody uses, stand in the first panel.
_PANELS = {
    BATCH: "batch output parallel",
    SAMPLING: "top_p top_k min_p repetition_penalty frequency_penalty presence_penalty coupled no_repeat_ngram "
    "dry_multiplier dry_base dry_allowed_length dry_range",
    SPECULATION: "method draft gamma1 gamma2 budget chunk rebuild_every retrieval_kv sink window middle tree "
    "tree_sampling",
    CONTEXT: "cache cache_limit think",
    MEMORY: "memory host_memory offload resident_layers host_share link_gb_s approximate disk disk_limit experts "
    "expert_layers kv",
    MACHINE: "profile device dtype kernel quantize threads prefill_chunk tensor_parallel join_timeout",
}
PANELS = {name: panel for panel, names in _PANELS.items() for name in names.split()}
_METAVARS = {
    "X": "temperature top_p min_p repetition_penalty frequency_penalty presence_penalty dry_multiplier dry_base "
    "host_share",
    "NAME": "method device dtype kernel quantize offload tree_sampling middle approximate kv retrieval_kv experts",
    "MODEL": "model draft",
    "TREE": "tree",
}
_METAVAR_OF = {name: metavar for metavar, names in _METAVARS.items() for name in names.split()}
THINK = ("on", "off", AUTO)  # values of --think


def described(help: str, default: str) -> str:
    """Return the help of an option with its default, short enough for one line."""
    return f"{help} [dim]({default})[/dim]"


def _setting(
    name: str, help: str, default: str | None = None, *names: str, among: Sequence[str] = (), **rest: Any
) -> Any:
    """Return an option with the setting's flag and environment variable; `default` describes it, else it is shown."""
    flags = names or (f"--{name.replace('_', '-')}",)
    shown = {"show_envvar": False, "rich_help_panel": PANELS.get(name), "metavar": _METAVAR_OF.get(name, "N")}
    shown |= {"help": described(help, default or str(_DEFAULTS[name])), "envvar": f"TRIFORCE_{name.upper()}"}
    return option(*flags, among=among, **shown | rest)


def option(*names: str, among: Sequence[str] = (), **rest: Any) -> Any:
    """Return an option whose help does not show its default by itself; `among` completes its values."""
    completion = {"autocompletion": _complete_from(*among)} if among else {}
    return typer.Option(*names, **{"show_default": False} | completion | rest)


def _complete_model(incomplete: str) -> list[str]:
    from offload.loading.hub.bundled import EMBEDDED
    from offload.loading.hub.registry import HUB_MODELS

    return [name for name in (*EMBEDDED, *HUB_MODELS) if name.lower().startswith(incomplete.lower())]


def complete_profile(incomplete: str) -> list[str]:
    from offload.hardware.profiles import available

    return [name for name in available() if name.startswith(incomplete)]


def _complete_from(*names: str) -> Any:
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


_MODELS = "model's"


def model_option(default: str | None = None) -> Any:
    """Return the option --model; `default` describes a command's own default."""
    help = "Name, hub id or path."
    return _setting("model", help, default, "--model", "-m", autocompletion=_complete_model)


Model = Annotated[str | None, model_option()]
Device = Annotated[str | None, _setting("device", "cpu or cuda.", among=DEVICES)]
Dtype = Annotated[str | None, _setting("dtype", "bfloat16, float16, float32.", among=DTYPES)]
Kernel = Annotated[str | None, _setting("kernel", "amx, avx512, avx2, portable or off.", among=KERNELS)]
Quantize = Annotated[str | None, _setting("quantize", "Round the weights: q4, q5, q6, q8.", "no", among=QUANTIZE)]
Threads = Annotated[int | None, _setting("threads", "CPU threads.", "all cores")]
PrefillChunk = Annotated[int | None, _setting("prefill_chunk", "Prompt tokens per forward pass.")]

Temperature = Annotated[float | None, _setting("temperature", "0 is greedy, 1 is varied.", _MODELS)]
TopP = Annotated[float | None, _setting("top_p", "Keep the likeliest up to this sum.", _MODELS)]
TopK = Annotated[int | None, _setting("top_k", "Keep this many of the likeliest.", _MODELS)]
MinP = Annotated[float | None, _setting("min_p", "Least share of the best one's.", _MODELS)]
RepetitionPenalty = Annotated[float | None, _setting("repetition_penalty", "Above 1: penalize repeats.", _MODELS)]
FrequencyPenalty = Annotated[float | None, _setting("frequency_penalty", "Penalty for each occurrence.", _MODELS)]
PresencePenalty = Annotated[float | None, _setting("presence_penalty", "Penalty for any occurrence.", _MODELS)]
DryMultiplier = Annotated[float | None, _setting("dry_multiplier", "Penalty for repetitions (DRY).", _MODELS)]
DryBase = Annotated[float | None, _setting("dry_base", "Its growth for each token.", _MODELS)]
DryAllowedLength = Annotated[int | None, _setting("dry_allowed_length", "Repeated tokens without it.", _MODELS)]
DryRange = Annotated[int | None, _setting("dry_range", "Latest tokens that it looks at.", _MODELS)]
NoRepeatNgram = Annotated[int | None, _setting("no_repeat_ngram", "Forbid n-grams to occur twice.", _MODELS)]
Seed = Annotated[int | None, _setting("seed", "Random seed.", "random")]
Coupled = Annotated[
    str | None,
    _setting(
        "coupled",
        "coupled: the seed gives one text.",
        "by --seed",
        "--sampling",
        parser=parse_sampling,
        metavar="NAME",
        envvar="TRIFORCE_SAMPLING",
        among=(COUPLED, FASTEST),
    ),
]
MaxNewTokens = Annotated[
    int | None, _setting("max_new_tokens", "Most tokens to generate.", None, "--max-new-tokens", "-n")
]
AnswerTokens = Annotated[
    int | None, _setting("max_new_tokens", "Most tokens to generate.", "by --length", "--max-new-tokens", "-n")
]
Stop = Annotated[list[str] | None, option("--stop", metavar="TEXT", help="End before this text; repeatable.")]

Method = Annotated[str | None, _setting("method", "Decoding method; all are lossless.", among=METHODS)]
Draft = Annotated[str | None, _setting("draft", "Drafter: lookup, none, self, or a model.", among=DRAFTS)]
Middle = Annotated[str | None, _setting("middle", "retrieval, streaming or h2o.", "the method's", among=MIDDLES)]
Sink = Annotated[int | None, _setting("sink", "First tokens that small caches keep.")]
Window = Annotated[int | None, _setting("window", "Latest tokens that a draft model sees.")]
Budget = Annotated[int | None, _setting("budget", "Tokens in the retrieval cache.", "3 %")]
Chunk = Annotated[int | None, _setting("chunk", "Tokens that are retrieved together.")]
RebuildEvery = Annotated[int | None, _setting("rebuild_every", "Retrieve again after N tokens.", "adaptive")]
Gamma1 = Annotated[int | None, _setting("gamma1", "Drafted for the retrieval cache.", "adaptive")]
Gamma2 = Annotated[int | None, _setting("gamma2", "Drafted for the full cache.", "adaptive")]
Tree = Annotated[str | None, _setting("tree", "N nodes, auto, k-ary:2x3x1.", among=("chain", "auto", "k-ary:"))]
TreeDraws = Annotated[str | None, _setting("tree_sampling", "How siblings are drawn.", among=TREE_SAMPLINGS)]

Offload = Annotated[str | None, _setting("offload", "none, stream, host or hybrid.", among=OFFLOADS)]
_SIZE = {"parser": parse_size, "metavar": "SIZE"}
Memory = Annotated[int | None, _setting("memory", "Device memory, such as 22GiB.", "free", **_SIZE)]
HostMemory = Annotated[int | None, _setting("host_memory", "Host memory, such as 64GiB.", "free", **_SIZE)]
ResidentLayers = Annotated[int | None, _setting("resident_layers", "Layers with KV on the device.", "most")]
HostShare = Annotated[float | None, _setting("host_share", "The host's part of the KV.", "balanced")]
LinkRate = Annotated[float | None, _setting("link_gb_s", "Simulated link, on a CPU.", "none", "--link", metavar="GB/S")]
ExpertsWay = Annotated[str | None, _setting("experts", "Experts: device, host or stream.", among=EXPERTS)]
ExpertLayers = Annotated[int | None, _setting("expert_layers", "Layers with experts on the device.", "most")]
Disk = Annotated[str | None, _setting("disk", "Folder for KV beyond host memory.", "none", metavar="PATH")]
DiskLimit = Annotated[int | None, _setting("disk_limit", "Disk space for it.", "free", **_SIZE)]
Cache = Annotated[
    bool | None, _setting("cache", "Keep prompts on disk.", "long ones", "--cache/--no-cache", metavar=None)
]
CacheLimit = Annotated[int | None, _setting("cache_limit", "Disk space for it.", "20GiB", **_SIZE)]
Approximate = Annotated[
    str | None, _setting("approximate", f"Lossy: {', '.join(APPROXIMATIONS)}.", "no", among=list(APPROXIMATIONS))
]
RetrievalKv = Annotated[
    str | None, _setting("retrieval_kv", f"Retrieval cache in {', '.join(LOSSY_KV)}.", among=[EXACT, *LOSSY_KV])
]
Kv = Annotated[str | None, _setting("kv", f"packed: exact; {', '.join(LOSSY_KV)}: lossy.", among=list(KV_FORMATS))]
TensorParallel = Annotated[int | None, _setting("tensor_parallel", "GPUs that share the model.", "profile's")]
JoinTimeout = Annotated[float | None, _setting("join_timeout", "Wait for the other ranks.", metavar="SECONDS")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan; load nothing.", rich_help_panel=MEMORY)]
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
    _setting("profile", "Hardware profile, or a YAML file.", "found", metavar="NAME", autocompletion=complete_profile),
]
PromptFiles = Annotated[
    list[str] | None, option("--prompt-file", "-f", metavar="FILE", help="Read a file; repeatable; - is stdin.")
]
Encoding = Annotated[
    str | None,
    option(
        "--encoding",
        metavar="NAME",
        help=described("Of text files, such as cp1252.", "guessed"),
        rich_help_panel=CONTEXT,
        parser=encoding_named,
    ),
]
Batch = Annotated[
    str | None,
    option("--batch", metavar="FILE", help="Answer all prompts of a file of JSON lines.", rich_help_panel=BATCH),
]
Output = Annotated[
    str | None,
    option("--output", "-o", metavar="FILE", help="Write here; with --batch, resumable.", rich_help_panel=BATCH),
]
TextFiles = Annotated[
    list[str] | None, option("--output", "-o", metavar="FILE", help="Write here; one, or one a document.")
]
ParallelSequences = Annotated[
    Any,
    option(
        "--parallel",
        metavar="N",
        help=described("Sequences at a time.", "auto"),
        parser=parse_parallel,
        rich_help_panel=BATCH,
    ),
]
System = Annotated[str | None, option(metavar="TEXT", help="System message.")]
Think = Annotated[str | None, _setting("think", "Think before the answer.", AUTO, metavar="on|off", among=THINK)]
ShowThinking = Annotated[
    bool, typer.Option("--show-thinking", help="Thinking on stdout, too.", rich_help_panel=CONTEXT)
]
Raw = Annotated[bool, typer.Option("--raw", help="Use no chat template.", rich_help_panel=CONTEXT)]
Verify = Annotated[bool, typer.Option("--verify", help="Compare with plain decoding.", rich_help_panel=SPECULATION)]
ExtendContext = Annotated[
    bool, typer.Option("--extend-context", help="Extend the context (YaRN).", rich_help_panel=CONTEXT)
]
Truncate = Annotated[
    str | None,
    option(
        "--truncate",
        metavar="PART",
        help="Drop the start, middle or end.",
        rich_help_panel=CONTEXT,
        among=("start", "middle", "end"),
    ),
]
Json = Annotated[bool, typer.Option("--json", help="JSON lines instead of text.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only the text.")]
ShowConfig = Annotated[
    bool, typer.Option("--show-config", help="Print settings; run nothing.", rich_help_panel=MACHINE)
]
Verbose = Annotated[
    int, option("--verbose", "-v", count=True, metavar="", help="Also statistics, and settings; -vv: all.")
]
