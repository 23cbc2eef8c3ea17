"""Names of options, values and commands that people know and this version does not have: what to use instead.

Removed ones are those of the last version: the next one drops them. Imports nothing heavy.
"""

from collections.abc import Collection, Sequence

from offload.errors import UsageError
from offload.settings.parse import NAMES

REMOVED: dict[str, str] = {  # "command", "--option" or "--option value" -> the hint
    "--list": "use `triforce models`",
    "--shared-prefix": "open_model(...).fitting_sequences(tokens) says how many sequences fit",
    "--batch": "use `triforce generate --batch`, whose summary has the tokens a second",
    "--ray": "run `triforce summarize` for the documents of each machine; `triforce generate --batch` has --ray",
    "--map-reduce": "leave it out: a document that exceeds the context is read in parts",
    "experiment": "scripts/papers.py prints published values beside planned and measured ones; `bench` takes lists",
    "--cache-scope": "leave it out: clients share what is cached; --no-cache keeps nothing on disk",
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
    "--sampling": "use --set coupled=true",
}

_FOREIGN = {  # other programs' options
    option: hint
    for options, hint in {
        "--max-tokens --num-predict --n-predict": "use --max-new-tokens N",
        "--temp": "use --temperature X",
        "--repeat-penalty": "use --repetition-penalty X, which looks at all tokens",
        "-p --prompt": 'the prompt is an argument: triforce generate "TEXT"; -f FILE reads a file',
        "--file": "use -f FILE",
        "--system-prompt": "use --system TEXT",
        "-c --context --ctx-size --num-ctx --max-model-len": "memory is planned for the prompt; use --truncate or "
        "--extend-context beyond the model's context",
        "--color": "put it before the command: triforce --color never generate",
        "--stream --no-stream": "leave it out: text is written as it comes",
        "-hf --hf-repo": "use --model OWNER/NAME",
        "--cache-type-k --cache-type-v --kv-cache-dtype": "use --kv packed, which is exact, or --kv q8, which is lossy",
        "-ngl --n-gpu-layers --gpu-layers": "the plan decides what lies where: --dry-run prints it, and "
        "--memory 22GiB limits it",
        "--gpu-memory-utilization": "use --memory SIZE, such as 22GiB",
        "-fa --flash-attn": "leave it out: attention is chosen by what the machine can do",
        "-md --draft-model --model-draft": "use --draft MODEL",
        "--num-speculative-tokens --draft-max": "the length of drafts is adaptive; --gamma2 N fixes it",
        "--tensor-parallel-size": "use --tensor-parallel N",
        "--n-threads": "use --threads N",
    }.items()
    for option in options.split()
}
_COMMANDS = {  # other programs' commands
    "run": 'triforce generate "a prompt"',
    "ask": 'triforce summarize book.txt --question "Who tells it?"',
    "list": "triforce models, or triforce cache list for cached prompts",
    "rm": "triforce models rm MODEL, or triforce cache rm ID",
    "version": "triforce --version",
    "help": "triforce COMMAND --help",
}


def refuse_unknown_command(args: Sequence[str]) -> None:
    """Raise UsageError if the first of `args` is a known command that is not here, with what to use instead."""
    name = args[0] if args and not args[0].startswith("-") else ""
    if name in REMOVED:
        raise UsageError(f"the command {name} was removed", REMOVED[name])
    if name in _COMMANDS:
        raise UsageError(f"there is no command {name!r}", f"use {_COMMANDS[name]}")


def refuse_unknown_options(args: Sequence[str], own: Collection[str]) -> None:
    """Raise UsageError if `args` name a known option or value that is not here, with what to use instead.

    `own` are the options that the command has, with their dashes. Typer would read -ngl as -n with the value gl.
    """
    words = [word for arg in args for word in (arg.split("=", 1) if arg.startswith("--") else [arg])]
    for word, following in zip(words, [*words[1:], ""], strict=False):
        name = word.replace("_", "-") if word.startswith("--") else word
        for known in (name, f"{name} {following}"):
            if known in own or not known.startswith("-"):
                continue
            if known in REMOVED:
                raise UsageError(f"{known} was removed", REMOVED[known])
            if known in _FOREIGN:
                raise UsageError(f"there is no option {known}", _FOREIGN[known])
            if (setting := known[2:].replace("-", "_")) in NAMES and {"--set", known} & {*own} == {"--set"}:
                raise UsageError(f"{known} has no option of its own", f"use --set {setting}=VALUE (docs/options.md)")
