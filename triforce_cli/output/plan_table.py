"""Several plans as a table, the fastest first."""

from collections.abc import Sequence

from rich.text import Text

from offload.planning.plan import Plan
from offload.units import GIB, counted

from .cursor import visible
from .format import duration, milliseconds
from .plan_text import model_line, quantization_lines
from .tables import Column, table, wrapped

_USUAL_WIDTH = 80  # of a table that is not written to a terminal
_COLUMNS = (
    Column("profile", least=12, style="cyan"),
    *(Column(name, right=True, dropped=rank) for name, rank in (("device", 3), ("host", 5), ("TTFT", 2), ("ar ms", 4))),
    *(Column("method", dropped=1), Column("ms", right=True), Column("speedup", right=True)),
)


def comparison_text(plans: Sequence[Plan], width: int | None = None) -> Text:
    """Return a table with a row for each plan that fits, the fastest first, below a line with model and context.

    Plans that do not fit are listed below it. `width` is the terminal's in cells; None stands for 80, which no line
    exceeds.
    """
    fitting = sorted((plan for plan in plans if plan.fits), key=lambda plan: plan.chosen.tbt.seconds)
    width = width or _USUAL_WIDTH
    context = model_line(plans[0]).replace("; ", "\ncontext    ")
    if plans[0].request.is_quantized:
        context += f"\n{next(quantization_lines(plans[0]))}"
    head = f"{context}\nmemory     in GiB, on each device and on the host; ar is plain decoding"
    lines = (each for line in head.splitlines() for each in wrapped(visible(line), width))
    parts = [Text("\n".join(lines) + "\n")]
    if fitting:
        parts.append(table(_COLUMNS, [_cells(plan) for plan in fitting], width))
    if missing := [plan.request.hardware.name for plan in plans if not plan.fits]:
        text = f"{counted(len(missing), 'profile')} too small: {', '.join(missing)}"
        parts.append(Text("\n".join(wrapped(visible(text), width)) + "\n"))
    return Text("\n").join(parts)


def _cells(plan: Plan) -> tuple[str, ...]:
    memory = (f"{plan.device.total / GIB:.1f}", f"{plan.host.total / GIB:.1f}")
    times = (duration(plan.ttft.seconds), milliseconds(plan.plain.tbt.seconds))
    chosen = (plan.chosen.method, milliseconds(plan.chosen.tbt.seconds), f"{plan.speedup:.2f}x")
    return (plan.request.hardware.name, *memory, *times, *chosen)
