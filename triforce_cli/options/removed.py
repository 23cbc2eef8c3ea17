"""Options, values of options and commands of the last version that are gone: what to use instead.

The next version drops this table: their names are then unknown like any others.
"""

from collections.abc import Collection, Sequence

from offload.errors import UsageError

REMOVED: dict[str, str] = {  # "command", "--option" or "--option value" -> the hint
    "--batch": "use `triforce generate --batch`, whose summary has the tokens a second",
    "--ray": "run `triforce summarize` for the documents of each machine; `triforce generate --batch` has --ray",
    "--map-reduce": "leave it out: a document that exceeds the context is read in parts",
    "experiment": "scripts/papers.py prints published values beside planned and measured ones; `bench` takes lists",
    "--probabilities": "triforce serve has `logprobs`, with which clients compare the first tokens of choices",
    "evaluate": "lm-eval measures through `triforce serve` (docs/serve.md); `bench --quality` compares lossy modes",
    "--ladder": "--context and --temperature take lists: triforce bench -f book.txt --context 4K,8K",
    "--page": "`bench --json` has all figures",
    "--peers": "scripts/bench_peers.py compares with transformers and llama.cpp",
    "--points": "leave it out: a benchmark runs at once; `--json` keeps its figures",
    "--csv": "use --json",
    "--plot": "draw the figures of --json",
    "--data": "give a text with -f FILE",
    "--prompts": "give one text with -f FILE, and another run for another",
    "--each-file": "give one text with -f FILE, and another run for another",
    "--needles": "lm-eval measures needles through `triforce serve` (docs/serve.md)",
    "distill": "`speculators` (https://github.com/vllm-project/speculators) trains heads; --draft loads them",
    "--middle q4": "use --offload planes, or leave --middle out",
    "--draft self": "use --draft lookup, or a small model with the same vocabulary",
    "--tree grown": "use --tree auto, or --tree 64 for the best tree of a size",
    "--experts stream": "--experts host copies them for prompts",
    "--experts hybrid": "--experts host does both: it runs them there for steps, and copies them for prompts",
    "--kernel amx": "leave it out: auto takes avx512 there",
    "--nodes": "plan one machine; a run over several is torchrun's (docs/multi-gpu.md)",
    "--node-link": "plan one machine; a run over several is torchrun's (docs/multi-gpu.md)",
    "--cache-store": "set TRIFORCE_HOME to a folder that all machines mount",
    "--middle h2o": "use --middle retrieval, which is the default",
    "--kv exact": "use --kv bf16, another name of the same",
    "--kv q4": "use --kv q8",
    "--kv fp8": "use --kv q8",
    "--approximate retrieval": "use --approximate h2o, or --method retrieval, which is exact",
    "--expert-layers": "leave it out: as many experts as fit are on the device",
    "--retrieval-kv": "leave it out: the retrieval cache reads keys and values as they are",
    "--encoding": "the encoding is recognised; convert what is not with iconv",
    "--show-config": "use -vv, which prints all settings",
    "--no-measure": "leave it out: `profile --measure` measures this machine",
    "--shard": "split the file, as with `split -n l/4 prompts.jsonl part-`, and answer each part with its own --output",
}

_SET = {  # options of settings that few people change
    "sampling": "coupled=true",
    "frequency-penalty": "frequency_penalty=0.5",
    "presence-penalty": "presence_penalty=0.5",
    "dry-multiplier": "dry_multiplier=0.8",
    "dry-base": "dry_base=1.75",
    "dry-allowed-length": "dry_allowed_length=2",
    "dry-range": "dry_range=1000",
    "no-repeat-ngram": "no_repeat_ngram=3",
    "gamma1": "gamma1=4",
    "sink": "sink=16",
    "window": "window=240",
    "chunk": "chunk=8",
    "rebuild-every": "rebuild_every=64",
    "tree-sampling": "tree_sampling=top-k",
    "host-share": "host_share=0.5",
    "cache-limit": "cache_limit=20GiB",
    "disk-limit": "disk_limit=100GiB",
    "prefill-chunk": "prefill_chunk=512",
    "join-timeout": "join_timeout=300",
}
REMOVED |= {f"--{name}": f"use --set, such as --set {example}" for name, example in _SET.items()}


def refuse_removed_command(args: Sequence[str]) -> None:
    """Raise UsageError if the first of `args` is a command that is gone, with what to use instead."""
    if args and not args[0].startswith("-") and args[0] in REMOVED:
        raise UsageError(f"the command {args[0]} was removed", REMOVED[args[0]])


def refuse_removed_options(args: Sequence[str], own: Collection[str]) -> None:
    """Raise UsageError if `args` name an option or a value that is gone, with what to use instead.

    `own` are the options that the command has, with their dashes.
    """
    words = [word for arg in args for word in (arg.split("=", 1) if arg.startswith("--") else [arg])]
    for first, second in zip(words, [*words[1:], ""], strict=False):
        for name in (first, f"{first} {second}"):
            if name.startswith("--") and name in REMOVED and name not in own:
                raise UsageError(f"{name} was removed", REMOVED[name])
