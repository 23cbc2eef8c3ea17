"""What other programs call options, and what to use here. Imports nothing heavy."""

_LIMIT = "use --max-new-tokens N"
_THREADS = "use --threads N"
_CONTEXT = "memory is planned for the prompt; use --truncate or --extend-context beyond the model's context"
_PLACED = "the plan decides what lies where: --dry-run prints it, and --memory 22GiB limits it"
_DRAFT = "use --draft MODEL"
_KV = "use --kv packed, which is exact, or --kv q8, which is lossy"
_TOKENS_DRAFTED = "the length of drafts is adaptive; --gamma2 N fixes it"
_STREAM = "leave it out: text is written as it comes"
_OPTIONS = {  # without their dashes; those of llama.cpp with one dash have it
    "max-tokens": _LIMIT,
    "num-predict": _LIMIT,
    "n-predict": _LIMIT,
    "temp": "use --temperature X",
    "repeat-penalty": "use --repetition-penalty X, which looks at all tokens",
    "prompt": 'the prompt is an argument: triforce generate "TEXT"; -f FILE reads a file',
    "-p": 'the prompt is an argument: triforce generate "TEXT"; -f FILE reads a file',
    "file": "use -f FILE",
    "system-prompt": "use --system TEXT",
    "ctx-size": _CONTEXT,
    "num-ctx": _CONTEXT,
    "max-model-len": _CONTEXT,
    "-c": _CONTEXT,
    "stream": _STREAM,
    "no-stream": _STREAM,
    "hf-repo": "use --model OWNER/NAME",
    "-hf": "use --model OWNER/NAME",
    "cache-type-k": _KV,
    "cache-type-v": _KV,
    "kv-cache-dtype": _KV,
    "n-gpu-layers": _PLACED,
    "gpu-layers": _PLACED,
    "-ngl": _PLACED,
    "gpu-memory-utilization": "use --memory SIZE, such as 22GiB",
    "flash-attn": "leave it out: attention is chosen by what the machine can do",
    "-fa": "leave it out: attention is chosen by what the machine can do",
    "draft-model": _DRAFT,
    "model-draft": _DRAFT,
    "-md": _DRAFT,
    "num-speculative-tokens": _TOKENS_DRAFTED,
    "draft-max": _TOKENS_DRAFTED,
    "tensor-parallel-size": "use --tensor-parallel N",
    "n-threads": _THREADS,
}
COMMANDS = {  # of the command line
    "run": 'triforce generate "a prompt"',
    "ask": 'triforce summarize book.txt --question "Who tells it?"',
    "list": "triforce cache list for cached prompts, or triforce doctor for models",
    "version": "triforce --version",
    "help": "triforce COMMAND --help",
}


def hint_for(option: str) -> str:
    """Return what to use in place of another program's option, given with its dashes; "" if it is not known."""
    is_long = not option.startswith("-") or option.startswith("--")
    return _OPTIONS.get(option.lstrip("-").replace("_", "-") if is_long else option, "")
