"""`triforce generate`: a prompt in, the model's continuation out, live."""

from __future__ import annotations

from typing import Annotated

import typer

from offload.config import Sampling, check_part

from .. import options
from ..context import given
from ..launching import launch, ranks_to_start
from ..prompt import read_prompt
from ..ranks import joined, told
from ..settings import refuse_both, refuse_broken_text, refuse_unverifiable, resolve


@options.accepts(options.PLACEMENT | options.PARALLEL)
def generate(
    ctx: typer.Context,
    prompt: Annotated[
        str | None, typer.Argument(help="Text, placed after files and stdin.", show_default=False)
    ] = None,
    prompt_file: options.PromptFiles = None,
    system: Annotated[
        str | None, typer.Option(help="A system message for the chat template.", show_default=False)
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    model: options.Model = None,
    max_new_tokens: options.MaxNewTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    method: options.Method = None,
    draft: options.Draft = None,
    sink: options.Sink = None,
    window: options.Window = None,
    budget: options.Budget = None,
    chunk: options.Chunk = None,
    rebuild_every: options.RebuildEvery = None,
    gamma1: options.Gamma1 = None,
    gamma2: options.Gamma2 = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Decode plainly once more, and compare. Greedy decoding only.")
    ] = False,
    profile: options.ProfileName = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    kernel: options.Kernel = None,
    threads: options.Threads = None,
    prefill_chunk: options.PrefillChunk = None,
    dry_run: options.DryRun = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> int:
    """Read a prompt of any length and write what the model says, live.

    The prompt is --prompt-file, piped stdin and the argument, joined in that order with a blank line between. Text goes
    to stdout; progress and statistics go to stderr.

    [bold]Examples[/bold]

      triforce generate "Write a haiku about long books."

      triforce generate --prompt-file book.txt "Summarize the text above."

      cat book.txt | triforce generate "Who tells this story?" > answer.txt

      triforce generate -f book.txt --raw --temperature 0 -n 200 --json

      triforce generate -f book.txt "What happens in the end?" --method lookup --temperature 0 --verify

      triforce generate -f book.txt "What happens in the end?" --memory 22GiB --dry-run
    """
    flags, origins = given(ctx)
    refuse_both(ctx.params, "raw", "system", "--raw uses no chat template, so there is no place for a system message")
    refuse_both(ctx.params, "quiet", "verbose", "choose one")
    for name, texts in (("--system", [system or ""]), ("--stop", stop or [])):
        refuse_broken_text(name, texts)
    check_part(flags)
    terminal = ctx.obj.terminal
    settings = resolve(flags, origins, profile)
    if verify:
        refuse_unverifiable(settings.sampling(Sampling(temperature=0)))  # as far as it was chosen here
    if not dry_run and (count := ranks_to_start(settings)):
        return launch(count, settings, ctx.obj.home, terminal)
    group, settings = joined(settings)
    text = told(group, lambda: read_prompt(prompt, prompt_file or [], terminal.stdin, terminal.warn))

    from ..generation import Output, Request, run_request  # from here on torch is needed

    request = Request(text, system, raw, settings, ctx.obj.home, verify, dry_run, group)
    return run_request(request, terminal, Output(json=json, quiet=quiet, verbose=verbose))
