"""`triforce distill`: train an EAGLE-3 head for a model, which then drafts for it."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload.errors import SettingsError
from offload.settings.config import check_part
from offload.settings.distillation import Distillation
from offload.units import parse_tokens, size_text

from ..input.documents import read_documents
from ..options import declarations as options
from ..options.settings import given_options, resolve
from ..output.format import duration, percent
from ..output.progress import DownloadBar
from ..output.stdout_formats import json_line
from ..output.terminal import Terminal

if TYPE_CHECKING:
    from offload.api.opened_model import OpenModel
    from offload.training.distill import Distiller, Evaluated
    from offload.training.texts import Texts

_TRAINING = "Training"
_DEFAULTS = Distillation()
_MINUTES = 60.0


def _setting(name: str, help: str, flag: str = "", **more: Any) -> Any:
    flag, default = flag or f"--{name.replace('_', '-')}", getattr(_DEFAULTS, name)
    shown = f"{default:,}" if isinstance(default, int) else f"{default:g}"
    return options.option(flag, help=options.described(help, shown), rich_help_panel=_TRAINING, **more)


def _tokens(name: str, help: str, flag: str = "") -> Any:
    return _setting(name, help, flag, parser=parse_tokens, metavar="TOKENS")


@options.accepts(options.chosen("model profile device dtype kernel quantize threads"))
def distill(
    ctx: typer.Context,
    output: Annotated[str, options.option("--output", "-o", metavar="DIR", help="The head; resumable.")],
    data: Annotated[list[str] | None, options.option("--data", metavar="FILE", help="A text; repeatable.")] = None,
    held_out: Annotated[
        list[str] | None,
        options.option(
            "--held-out", metavar="FILE", help=options.described("A text to measure on.", "a tenth of each")
        ),
    ] = None,
    tokens: Annotated[int | None, _tokens("tokens", "Tokens to train on.")] = None,
    length: Annotated[int | None, _tokens("length", "Tokens that the head sees together.")] = None,
    written: Annotated[float | None, _setting("written", "Share of them that the model writes.", metavar="X")] = None,
    vocab: Annotated[int | None, _tokens("vocab", "Tokens that it can propose.", "--draft-vocab")] = None,
    window: Annotated[int | None, _tokens("window", "Latest tokens that it attends to.")] = None,
    depth: Annotated[int | None, _setting("depth", "Drafted tokens to train for.", metavar="N")] = None,
    steps: Annotated[int | None, _setting("steps", "Steps of the optimisation.", metavar="N")] = None,
    batch: Annotated[int | None, _setting("batch", "Sequences of --length in a step.", metavar="N")] = None,
    rate: Annotated[float | None, _setting("rate", "Highest learning rate.", metavar="X")] = None,
    seed: Annotated[int | None, _setting("seed", "Random seed.", metavar="N")] = None,
    save_every: Annotated[
        float, typer.Option("--save-every", metavar="MINUTES", help="Save and measure.", rich_help_panel=_TRAINING)
    ] = 5.0,
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    """Train an EAGLE-3 head for a model, on texts and on what the model writes after excerpts of them.

    `--draft DIR` then drafts with it. Without --data, the model writes everything. A run that was stopped goes on
    where it was, if the command is repeated. docs/distill.md says how long it takes, and what to expect.

    [bold]Examples[/bold]

      triforce distill --data book.txt --output head

      triforce distill -m Qwen/Qwen3-0.6B --data a.txt --data b.txt --held-out c.txt -o head --steps 20000

      triforce generate -f book.txt "Who is Alice?" --draft head
    """
    terminal = ctx.obj.terminal
    names = {field.name for field in fields(Distillation)}
    asked = {name: value for name, value in ctx.params.items() if name in names and value is not None}
    settings = Distillation(**asked)
    if save_every <= 0:
        raise SettingsError(f"--save-every is {save_every:g}", "use a number of minutes, such as 5")
    if Path(output).exists() and not Path(output).is_dir():
        raise SettingsError(f"--output {output} is a file", "give a folder, which is made if there is none")
    given, origins = given_options(ctx)
    given = {name: value for name, value in given.items() if name not in names}
    check_part(given)
    engine = resolve(given, origins, ctx.params["profile"]).engine
    texts, held = (
        [document.text for document in read_documents(files or [], terminal.stdin, terminal.warn)]
        for files in (data, held_out)
    )

    from offload.api.loader import open_model  # from here on torch is needed
    from offload.training.distill import Distiller

    with DownloadBar(terminal) as progress:
        opened = open_model(engine, ctx.obj.home, progress)
    distiller = Distiller(opened, *_texts(opened, texts, held, settings), settings, Path(output))
    found = _run(distiller, terminal, save_every * _MINUTES)
    _report(found, Path(output), terminal, json)


def _texts(opened: OpenModel, texts: list[str], held: list[str], settings: Distillation) -> tuple[Texts, Texts]:
    """Return the texts to train on and those that are held out. Raises SettingsError, CheckpointError."""
    from offload.training.texts import Texts

    ids, other = ([opened.tokenizer.encode(text) for text in each] for each in (texts, held))
    if ids and not other:
        borders = [9 * len(text) // 10 for text in ids]
        other = [text[border:] for text, border in zip(ids, borders, strict=True)]
        ids = [text[:border] for text, border in zip(ids, borders, strict=True)]
    for text in (*ids, *other):
        if len(text) < settings.length:
            raise SettingsError(
                f"a text, or the tenth of it that is held out, has {len(text):,} tokens: less than --length",
                "give a longer text, or several as one file, or use a smaller --length",
            )
    start = opened.tokenizer.encode("") or list(opened.checkpoint.shape.eos_ids[:1]) or [0]
    more = start, settings.written, settings.length
    return Texts(ids, *more), Texts(other, *more)


def _run(distiller: Distiller, terminal: Terminal, every: float) -> Evaluated:
    """Train, with progress on stderr; return the last measurement."""
    from offload.training.distill import Evaluated

    found, noted = None, ("", 0)
    with ExitStack() as shown, closing(distiller.run(every, every)) as events:
        bar = shown.enter_context(DownloadBar(terminal))
        try:
            for event in events:
                if not isinstance(event, Evaluated):
                    bar(event.stage, event.done, event.total)
                    tenth = event.stage, 10 * event.done // event.total
                    if tenth != noted and not terminal.shows_progress:  # a log has no bar
                        terminal.note(f"{event.stage}: {percent(event.done / event.total)}")
                        noted = tenth
                    continue
                found = event
                shown.close()  # erases the bar
                terminal.note(_line(event))
                bar = shown.enter_context(DownloadBar(terminal))
        except KeyboardInterrupt:
            events.close()
            shown.close()
            terminal.note("stopped; the same command goes on from here")
            raise
    assert found is not None, "a training ends with a measurement"
    return found


def _line(event: Evaluated) -> str:
    rates = ", ".join(f"{rate:.2f}" for rate in event.acceptance.sampled)
    left = f" · {duration(event.seconds_left)} left" if event.seconds_left else ""
    loss = "" if event.loss is None else f" · loss {event.loss:.3f}"
    return f"step {event.step:,} of {event.steps:,}{loss} · acceptance {rates}{left}"


def _report(event: Evaluated, folder: Path, terminal: Terminal, json: bool) -> None:
    """Print the acceptance on held-out texts, and what was written."""
    size = (folder / "model.safetensors").stat().st_size
    if json:
        found = asdict(event.acceptance)
        terminal.write(json_line(type="distill", output=str(folder), bytes=size, step=event.step, **found))
        return
    lines = ["held-out acceptance", "drafted token  temperature 1  greedy"]
    pairs = zip(event.acceptance.sampled, event.acceptance.greedy, strict=True)
    lines += [f"{depth:13}  {sampled:13.2f}  {greedy:6.2f}" for depth, (sampled, greedy) in enumerate(pairs, 1)]
    terminal.write("\n".join(lines) + "\n")
    terminal.note(f"{folder}: {size_text(size)}; use it with --draft {folder}; its folder training is no longer needed")
