"""Options, values of options and commands of the last version that are gone: what to use instead.

The next version drops this table: their names are then unknown like any others.
"""

from collections.abc import Sequence

from offload.errors import UsageError

REMOVED: dict[str, str] = {  # "command", "--option" or "--option value" -> the hint
    "experiment": "scripts/papers.py prints published values beside planned and measured ones; `bench` takes lists",
    "--probabilities": "triforce serve has `logprobs`, with which clients compare the first tokens of choices",
    "evaluate": "lm-eval measures through `triforce serve` (docs/serve.md); `bench --quality` compares lossy modes",
    "distill": "`speculators` (https://github.com/vllm-project/speculators) trains heads; --draft loads them",
    "--tree grown": "use --tree auto, or --tree 64 for the best tree of a size",
    "--kernel amx": "leave it out: auto takes avx512 there",
    "--nodes": "plan one machine; a run over several is torchrun's (docs/multi-gpu.md)",
    "--node-link": "plan one machine; a run over several is torchrun's (docs/multi-gpu.md)",
    "--cache-store": "set TRIFORCE_HOME to a folder that all machines mount",
}


def refuse_removed(args: Sequence[str]) -> None:
    """Raise UsageError if `args` name a command, an option or a value that is gone, with what to use instead."""
    words = [word for arg in args for word in (arg.split("=", 1) if arg.startswith("--") else [arg])]
    for first, second in zip(words, [*words[1:], ""], strict=False):
        for name in (first, f"{first} {second}"):
            if name.startswith("--") and name in REMOVED:
                raise UsageError(f"{name} was removed", REMOVED[name])
    if args and args[0] in REMOVED:
        raise UsageError(f"the command {args[0]} was removed", REMOVED[args[0]])
