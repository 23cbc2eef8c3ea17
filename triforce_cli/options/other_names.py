"""What other programs call things, and what they are called here: one table, a row for each name. Imports nothing.

A name of equal meaning is accepted; for any other there is a hint that says what to type instead.
"""

from __future__ import annotations

from typing import NamedTuple


class OtherName(NamedTuple):
    """A name that people know from another program.

    Attributes:
        name: without the dashes of a long option, with one dash for a short one; - stands for _ too.
        programs: which call it so.
        ours: the option of equal meaning, without dashes; "" if there is none.
        hint: what to type instead, said by commands that do not accept the name.
        commands: those that accept it, if they have the option `ours`; all where empty.
    """

    name: str
    programs: str
    ours: str = ""
    hint: str = ""
    commands: tuple[str, ...] = ()


_CONTEXT = "memory is planned for the prompt and its answer, so there is nothing to set; --extend-context goes beyond "
_CONTEXT += "the model's own context"
_PLACED = "what lies where is planned: --dry-run shows it, --memory 22GiB limits it, --device cpu uses no GPU"
_BEAMS = "there is no beam search; --temperature 0 takes the likeliest token"
_SAMPLER = "there is no such sampler; there are --top-k, --top-p, --min-p and the penalties"
_GRAMMAR = "answers cannot be bound to a grammar or a schema; --json writes the events of a run as JSON lines"
_PLANNED = "the method is chosen while running: --method, --draft and --gamma2 set it"
_AUTOMATIC = "leave it out: it is chosen by what the machine can do"
_CHAT = "triforce chat -f book.txt is a conversation"
_REPEATS = "use --repetition-penalty X, which looks at all tokens and not at the latest ones alone"
_TEMPLATE = "the model's own chat template is used; --raw uses none, and summarize --prompt FILE has one of yours"
_TRUNCATE = "use --truncate start, middle or end: the part that is left out"
_STREAMS = "leave it out: text is written as it comes, and is the same in a file; serve streams where a request asks"
_PROMPT = 'the prompt is an argument: triforce generate "TEXT"; -f FILE reads a file'
_QUESTION = 'the question is the argument: triforce generate -f book.txt "Who tells it?"'
_THINK = "use --think on or --think off"
_CONTEXT_OF = ("chat", "serve")

NAMES = (
    # How much is written, and how it is chosen.
    OtherName("max-tokens", "OpenAI, vLLM, llm", "max-new-tokens"),
    OtherName("max-completion-tokens", "OpenAI", "max-new-tokens"),
    OtherName("max-output-tokens", "OpenAI, llm", "max-new-tokens"),
    OtherName("num-predict", "ollama", "max-new-tokens"),
    OtherName("n-predict", "llama.cpp", "max-new-tokens"),
    OtherName("predict", "llama.cpp", "max-new-tokens"),
    OtherName("max-length", "transformers", hint="use --max-new-tokens N, which counts the answer alone"),
    OtherName("min-tokens", "vLLM", hint="an answer cannot be made longer; --max-new-tokens is the upper limit"),
    OtherName("min-new-tokens", "transformers", hint="an answer cannot be made longer; --max-new-tokens limits it"),
    OtherName("ignore-eos", "llama.cpp, vLLM", hint="triforce bench writes on past the end; no other command does"),
    OtherName("temp", "llama.cpp", "temperature"),
    OtherName("do-sample", "transformers", hint="--temperature above 0 samples, and 0 is greedy"),
    OtherName("greedy", "several", hint="use --temperature 0"),
    OtherName("repeat-penalty", "ollama, llama.cpp", hint=_REPEATS),
    OtherName("repeat-last-n", "ollama, llama.cpp", hint=_REPEATS),
    OtherName("dry-penalty-last-n", "llama.cpp", hint="use --dry-range N; 0 is all tokens"),
    OtherName("no-repeat-ngram-size", "transformers", "no-repeat-ngram"),
    OtherName("typical-p", "ollama, transformers", hint=_SAMPLER),
    OtherName("typical", "llama.cpp", hint=_SAMPLER),
    OtherName("mirostat", "ollama, llama.cpp", hint=_SAMPLER),
    OtherName("xtc-probability", "llama.cpp", hint=_SAMPLER),
    OtherName("top-nsigma", "llama.cpp", hint=_SAMPLER),
    OtherName("samplers", "llama.cpp", hint="the order of the samplers is fixed: docs/sampling.md"),
    OtherName("logit-bias", "OpenAI, llama.cpp", hint="single tokens cannot be made likelier"),
    OtherName("num-beams", "transformers", hint=_BEAMS),
    OtherName("use-beam-search", "vLLM", hint=_BEAMS),
    OtherName("stop-sequence", "several", "stop"),
    OtherName("stop-sequences", "Anthropic, TGI", "stop"),
    OtherName("stop-strings", "transformers", "stop"),
    OtherName("reverse-prompt", "llama.cpp", hint="use --stop TEXT, which ends the answer"),
    OtherName("-r", "llama.cpp", hint="use --stop TEXT, which ends the answer"),
    OtherName("grammar", "llama.cpp", hint=_GRAMMAR),
    OtherName("json-schema", "llama.cpp", hint=_GRAMMAR),
    OtherName("schema", "llm", hint=_GRAMMAR),
    OtherName("format", "ollama", hint=_GRAMMAR),
    # The prompt.
    OtherName("prompt", "llama.cpp, vLLM", hint=_PROMPT),
    OtherName("-p", "llama.cpp", hint=_PROMPT),
    OtherName("question", "several", hint=_QUESTION),
    OtherName("query", "several", hint=_QUESTION),
    OtherName("file", "llama.cpp", "prompt-file"),
    OtherName("input", "several", hint="use -f FILE"),
    OtherName("fragment", "llm", hint="use -f FILE; a page must be fetched first: curl -s URL | triforce generate"),
    OtherName("attachment", "llm", hint="use -f FILE; pictures and sounds are not read"),
    OtherName("-a", "llm", hint="use -f FILE; pictures and sounds are not read"),
    OtherName("system-prompt", "llama.cpp", "system", "each request brings its own system message"),
    OtherName("-sys", "llama.cpp", hint="use --system TEXT"),
    OtherName("system-prompt-file", "llama.cpp", hint='use --system "$(cat FILE)"'),
    OtherName("-s", "llm, llama.cpp", hint="write out what is meant: --system TEXT (llm), --seed N (llama.cpp)"),
    OtherName("template", "llm", hint=_TEMPLATE),
    OtherName("chat-template", "llama.cpp, vLLM", hint=_TEMPLATE),
    OtherName("-t", "llama.cpp, llm", hint="write out what is meant: --threads N (llama.cpp), or no template (llm)"),
    OtherName("no-display-prompt", "llama.cpp", hint="leave it out: the prompt is never printed"),
    OtherName("enable-thinking", "transformers, vLLM", hint=_THINK),
    OtherName("reasoning-effort", "OpenAI", hint=_THINK),
    OtherName("reasoning-budget", "llama.cpp", hint=_THINK),
    OtherName("hidethinking", "ollama", hint="thinking goes to stderr, and -q hides it"),
    # Conversations.
    OtherName("interactive", "llama.cpp", hint=_CHAT),
    OtherName("-i", "llama.cpp", hint=_CHAT),
    OtherName("conversation", "llama.cpp", hint=_CHAT),
    OtherName("-cnv", "llama.cpp", hint=_CHAT),
    OtherName("single-turn", "llama.cpp", hint="triforce generate answers once, triforce chat again and again"),
    OtherName("continue", "llm", hint="triforce chat --session FILE goes on with a conversation"),
    OtherName("cid", "llm", hint="triforce chat --session FILE goes on with a conversation"),
    OtherName("-c", "llama.cpp, llm", hint="--context N of chat and serve (llama.cpp), or chat --session FILE (llm)"),
    # The context.
    OtherName("ctx-size", "llama.cpp", "context", _CONTEXT, _CONTEXT_OF),
    OtherName("num-ctx", "ollama", "context", _CONTEXT, _CONTEXT_OF),
    OtherName("n-ctx", "llama.cpp", "context", _CONTEXT, _CONTEXT_OF),
    OtherName("max-model-len", "vLLM", "context", _CONTEXT, _CONTEXT_OF),
    OtherName("context-length", "several", "context", _CONTEXT, _CONTEXT_OF),
    OtherName("rope-scaling", "llama.cpp, vLLM", hint="--extend-context extends a context by YaRN, by what is needed"),
    OtherName("rope-scale", "llama.cpp", hint="--extend-context extends a context by YaRN, by what is needed"),
    OtherName("truncation-side", "transformers, vLLM", hint=_TRUNCATE),
    OtherName("truncate-prompt-tokens", "vLLM", hint=_TRUNCATE),
    OtherName("truncation", "transformers, OpenAI", hint=_TRUNCATE),
    OtherName("context-shift", "llama.cpp", hint=f"nothing is dropped silently; {_TRUNCATE}"),
    OtherName("keep", "llama.cpp", hint=f"nothing is dropped silently; {_TRUNCATE}"),
    OtherName("num-keep", "ollama", hint=f"nothing is dropped silently; {_TRUNCATE}"),
    # Output.
    OtherName("out", "several", "output"),
    OtherName("output-file", "several", "output"),
    OtherName("stream", "OpenAI", hint=_STREAMS),
    OtherName("no-stream", "llm", hint=_STREAMS),
    OtherName("silent", "several", "quiet"),
    OtherName("usage", "llm", hint="the last line on stderr counts tokens; -v tells more, --json all"),
    OtherName("-u", "llm", hint="the last line on stderr counts tokens; -v tells more, --json all"),
    OtherName("no-perf", "llama.cpp", hint="use -q for the text alone"),
    OtherName("log-file", "llama.cpp", hint="messages go to stderr: 2> FILE"),
    OtherName("no-log", "llm", hint="leave it out: prompts are not logged; --no-cache keeps none on disk"),
    OtherName("nowordwrap", "ollama", hint="leave it out: the text is never wrapped"),
    OtherName("color", "llama.cpp", hint="it stands before the command: triforce --color never generate"),
    OtherName("version", "several", hint="use triforce --version"),
    OtherName("debug", "several", hint="TRIFORCE_DEBUG=1 shows where an error was raised; -v shows all settings"),
    OtherName("num-return-sequences", "transformers", hint="one answer a run; `n` in a request to serve has several"),
    OtherName("logprobs", "OpenAI", hint="triforce serve has them: docs/serve.md"),
    # The model, and the machine.
    OtherName("model-name-or-path", "transformers", "model"),
    OtherName("hf-repo", "llama.cpp", hint="use --model OWNER/NAME; a .gguf file must be fetched first"),
    OtherName("-hf", "llama.cpp", hint="use --model OWNER/NAME; a .gguf file must be fetched first"),
    OtherName("tokenizer", "vLLM", hint="leave it out: it is the model's own"),
    OtherName("revision", "vLLM, transformers", hint="fetch that revision, and give --model its folder"),
    OtherName("trust-remote-code", "vLLM, transformers", hint="leave it out: no code from a checkpoint is ever run"),
    OtherName("download-dir", "vLLM", hint="HF_HOME is where hub models are kept, TRIFORCE_HOME the embedded one"),
    OtherName("torch-dtype", "transformers", "dtype"),
    OtherName("quantization", "vLLM", hint="a checkpoint's format is recognised; --quantize q8 rounds another one"),
    OtherName("load-in-4bit", "transformers", hint="use --quantize q4"),
    OtherName("load-in-8bit", "transformers", hint="use --quantize q8"),
    OtherName("kv-cache-dtype", "vLLM", hint="use --kv q8, q4 or fp8, which is lossy"),
    OtherName("cache-type-k", "llama.cpp", hint="use --kv q8, q4 or fp8, for keys and values, which is lossy"),
    OtherName("cache-type-v", "llama.cpp", hint="use --kv q8, q4 or fp8, for keys and values, which is lossy"),
    OtherName("-ctk", "llama.cpp", hint="use --kv q8, q4 or fp8, for keys and values, which is lossy"),
    OtherName("num-thread", "ollama", "threads"),
    OtherName("n-threads", "llama-cpp-python", "threads"),
    OtherName("n-gpu-layers", "llama.cpp", hint=_PLACED),
    OtherName("gpu-layers", "llama.cpp", hint=_PLACED),
    OtherName("-ngl", "llama.cpp", hint=_PLACED),
    OtherName("-fa", "llama.cpp", hint=_AUTOMATIC),
    OtherName("-md", "llama.cpp", hint="use --draft MODEL"),
    OtherName("-mu", "llama.cpp", hint="fetch the file first: curl -LO URL, then --model FILE.gguf"),
    OtherName("-V", "several", hint="use triforce --version"),
    OtherName("num-gpu", "ollama", hint=_PLACED),
    OtherName("device-map", "transformers", hint=_PLACED),
    OtherName("cpu-offload-gb", "vLLM", hint=_PLACED),
    OtherName("gpu-memory-utilization", "vLLM", hint="use --memory SIZE, such as 22GiB"),
    OtherName("tensor-parallel-size", "vLLM", "tensor-parallel"),
    OtherName("tensor-split", "llama.cpp", hint="use --tensor-parallel N, which splits evenly"),
    OtherName("batch-size", "llama.cpp", hint="--prefill-chunk N is how many prompt tokens run at once"),
    OtherName("ubatch-size", "llama.cpp", hint="--prefill-chunk N is how many prompt tokens run at once"),
    OtherName("num-batch", "ollama", hint="--prefill-chunk N is how many prompt tokens run at once"),
    OtherName("max-num-batched-tokens", "vLLM", hint="--prefill-chunk N is how many prompt tokens run at once"),
    OtherName("flash-attn", "llama.cpp", hint=_AUTOMATIC),
    OtherName("attn-implementation", "transformers", hint=_AUTOMATIC),
    OtherName("enforce-eager", "vLLM", hint=_AUTOMATIC),
    OtherName("mlock", "llama.cpp", hint=_AUTOMATIC),
    OtherName("no-mmap", "llama.cpp", hint=_AUTOMATIC),
    OtherName("prompt-cache", "llama.cpp", hint="long prompts are kept on disk by themselves: --cache, --no-cache"),
    OtherName("enable-prefix-caching", "vLLM", hint="long prompts are kept on disk by themselves: --cache, --no-cache"),
    # Speculative decoding.
    OtherName("model-draft", "llama.cpp", "draft"),
    OtherName("draft-model", "several", "draft"),
    OtherName("assistant-model", "transformers", "draft"),
    OtherName("speculative-model", "vLLM", "draft"),
    OtherName("speculative-config", "vLLM", hint=_PLANNED),
    OtherName("num-speculative-tokens", "vLLM", hint=_PLANNED),
    OtherName("draft-max", "llama.cpp", hint=_PLANNED),
    OtherName("prompt-lookup-num-tokens", "transformers", hint="--draft lookup is the default; --gamma2 N fixes it"),
    # Serving.
    OtherName("keepalive", "ollama", hint="triforce serve keeps the model loaded"),
    OtherName("max-num-seqs", "vLLM", "parallel", "--parallel N of serve and generate --batch", ("serve",)),
    OtherName("api-key", "vLLM, llama.cpp", hint="use --api-key-file FILE, or set TRIFORCE_API_KEY"),
    OtherName("allowed-origins", "vLLM", hint="use --cors ORIGIN, once for each"),
    OtherName("served-model-name", "vLLM", hint="requests name the model as --model does, or leave it out"),
)

# The same for the lines of `triforce chat`: accepted where there is a command, else a hint.
COMMANDS = (
    OtherName("/exit", "llama.cpp, ollama", "/quit"),
    OtherName("/bye", "ollama", "/quit"),
    OtherName("/q", "several", "/quit"),
    OtherName("/?", "ollama", "/help"),
    OtherName("/h", "several", "/help"),
    OtherName("/read", "llama.cpp", "/add"),
    OtherName("/regen", "llama.cpp", "/retry"),
    OtherName("/regenerate", "several", "/retry"),
    OtherName("/reset", "several", "/clear"),
    OtherName("/new", "several", "/clear"),
    OtherName("/show", "ollama", hint="/set shows the settings, /system the system message, /stats the numbers"),
    OtherName("/model", "several", hint="leave, and start with another --model; --session FILE keeps the conversation"),
)

_THINK_FIELD = 'use "chat_template_kwargs": {"enable_thinking": false}'
_NOTHING_CUT = "nothing is truncated: a prompt and its answer must fit max_model_len, which GET /v1/models tells"
_TEXT = "answers are plain text: no grammar and no schema binds them"

# Fields of requests to `triforce serve` that mean something else there than on the command line.
FIELDS = {
    each.name: each
    for each in (
        OtherName("max_new_tokens", "transformers, TGI", "max-new-tokens"),
        OtherName("reasoning_effort", "OpenAI", hint=_THINK_FIELD),
        OtherName("reasoning", "OpenAI", hint=_THINK_FIELD),
        OtherName("enable_thinking", "vLLM", hint=_THINK_FIELD),
        OtherName("think", "ollama", hint=_THINK_FIELD),
        OtherName("num_ctx", "ollama", hint="the server's --context sets it for all requests"),
        OtherName("truncate_prompt_tokens", "vLLM", hint=_NOTHING_CUT),
        OtherName("truncation", "OpenAI", hint=_NOTHING_CUT),
        OtherName("repeat_penalty", "ollama, llama.cpp", hint="use repetition_penalty, which looks at all tokens"),
        OtherName("options", "ollama", hint="its fields stand beside the others, such as temperature"),
        OtherName("keep_alive", "ollama", hint="leave it out: the model stays loaded"),
        OtherName("format", "ollama", hint=_TEXT),
        OtherName("grammar", "llama.cpp", hint=_TEXT),
        OtherName("json_schema", "llama.cpp", hint=_TEXT),
        OtherName("guided_json", "vLLM", hint=_TEXT),
        OtherName("input", "OpenAI", hint="use messages, or prompt at /v1/completions"),
        OtherName("system", "Anthropic, ollama", hint="use a message with the role system"),
        OtherName("ignore_eos", "vLLM, llama.cpp", hint="an answer cannot be made longer"),
        OtherName("min_tokens", "vLLM", hint="an answer cannot be made longer"),
    )
}

BY_NAME = {each.name: each for each in (*NAMES, *COMMANDS)}


def other_name(typed: str) -> OtherName | None:
    """Return the row of a name: an option with its dashes, a field of a request, or a command of a chat."""
    if typed.startswith("--") or not typed.startswith(("-", "/")):
        typed = typed.lstrip("-").replace("_", "-")
    return BY_NAME.get(typed)


def accepted(typed: str, own: set[str] | frozenset[str], command: str) -> str:
    """Return the long option that a command has for a long one as typed, without dashes; as typed if it has none.

    `own`: the command's own long options, without dashes.
    """
    name = typed.replace("_", "-")
    if typed in own or name in own:
        return typed if typed in own else name
    row = BY_NAME.get(name)
    is_meant = row is not None and row.ours in own and command in (row.commands or (command,))
    return row.ours if is_meant else typed
