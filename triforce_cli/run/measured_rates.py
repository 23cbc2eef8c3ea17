"""This machine's measured rates: loaded from the user's folder, measured anew, saved, shown beside data sheets.

Imports torch only when it measures.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from offload.errors import SettingsError, TriforceError, UnusableMeasurement
from offload.hardware import calibration
from offload.hardware.calibration import Measured
from offload.hardware.profiles import Profile, same_gpu
from offload.hardware.rates import Hardware

from ..options.settings import config_home, gpu_names
from ..output.tables import Column, table
from ..output.terminal import Terminal
from .processor import processor_name

_RATES = (
    ("gpu", "bandwidth_gb_s", "GPU memory", "GB/s"),
    ("gpu", "bf16_tflops", "GPU", "TFLOP/s bf16"),
    ("link", "bandwidth_gb_s", "link to the GPU", "GB/s"),
    ("host", "bandwidth_gb_s", "host memory", "GB/s"),
    ("host", "bf16_gflops", "host", "GFLOP/s bf16"),
    ("host", "disk_gb_s", "disk", "GB/s"),
)


def load_measured(terminal: Terminal) -> Measured | None:
    """Return the saved rates of this machine; None without any, and with a warning if the file is unusable."""
    try:
        return calibration.load(config_home(os.environ))
    except UnusableMeasurement as error:
        terminal.warn(f"{error.message}: {error.hint}")
        return None


def load_or_measure(on_gpu: bool, terminal: Terminal, disk: str | None = None) -> Measured | None:
    """Return the highest rates that this machine has shown: the saved ones, and those that are measured now.

    Where torch is imported, that takes 0.3 s on a CPU; else, and on a GPU, the first measurement is enough. What cannot
    be measured is left to data sheets: None. `on_gpu`: measure the first GPU too; `disk`: and the disk of that folder,
    if its rate was not saved.
    """
    measured, folder = load_measured(terminal), config_home(os.environ)
    if measured is None and not (folder / calibration.FILE).exists():  # else it is unusable, as the warning says
        measured = _measured_quickly(on_gpu, folder)
    elif measured is not None and "torch" in sys.modules and not on_gpu:
        measured = _measured_quickly(False, folder, measured)
    if disk is not None and measured is not None and measured.host.disk_gb_s is None:
        measured = _with_disk(measured, disk, terminal)
        with contextlib.suppress(TriforceError):  # a read-only folder
            calibration.save(measured, folder)
    return measured


def _measured_quickly(on_gpu: bool, folder: Path, saved: Measured | None = None) -> Measured | None:
    from offload.hardware.microbenchmarks import QUICK, measure

    try:
        measured = measure("cuda:0" if on_gpu else "cpu", processor_name(), sizes=QUICK)
        if on_gpu and (measured.gpu is None or measured.link is None):
            return None
        measured = measured if saved is None else calibration.fastest(saved, measured)
        calibration.save(measured, folder)
    except (TriforceError, RuntimeError, AssertionError):  # torch without CUDA, a GPU in use, a read-only folder
        return saved
    return measured


def _with_disk(measured: Measured, folder: str, terminal: Terminal) -> Measured:
    """Return the rates with that of a folder's disk; as they are, with a warning, where it cannot be measured."""
    from offload.hardware.microbenchmarks import QUICK, disk_rate

    try:
        return replace(measured, host=replace(measured.host, disk_gb_s=disk_rate(Path(folder), QUICK)))
    except (TriforceError, OSError) as error:
        terminal.warn(f"the disk of {folder} was not measured: {error}")
        return measured


def measure_here(chosen: Profile | None, found: Sequence[str], terminal: Terminal, disk: str | None = None) -> Measured:
    """Measure and return this machine's rates: the GPU of the profile, the first one without a profile, or the host.

    Args:
        found: names of this machine's GPUs.
        disk: a folder on the disk that is measured too.

    Raises SettingsError if the profile is of other hardware, TriforceError if its GPU cannot be measured.
    """
    device = "cpu" if chosen is not None and chosen.device == "cpu" else f"cuda:{_gpu_index(chosen, found)}"
    from offload.hardware.microbenchmarks import measure

    if terminal.stderr_is_terminal:
        terminal.note("measuring this machine, which takes some seconds")
    measured = measure(device, processor_name())
    if device != "cpu" and (measured.gpu is None or measured.link is None):
        raise TriforceError("the GPU cannot be measured: its memory is in use", "try again when others have left it")
    return measured if disk is None else _with_disk(measured, disk, terminal)


def _gpu_index(chosen: Profile | None, found: Sequence[str]) -> int:
    """Return the number that torch gives to the profile's GPU: its order differs from the driver's.

    Raises SettingsError for GPUs that this machine does not have, or not as many; TriforceError if torch sees none.
    """
    model = chosen.gpu.model if chosen is not None and chosen.gpu is not None else None
    if chosen is not None and sum(model is None or same_gpu(name, model) for name in found) < max(1, chosen.gpus):
        present = ", ".join(found) or "no GPU"
        message = f"--measure measures this machine, which has {present}, not {chosen.gpus} x {model or 'GPU'}"
        raise SettingsError(message, "leave out --gpu to measure what is here, or --measure to plan for the other")
    for index, name in enumerate(gpu_names()):
        if model is None or same_gpu(name, model):
            return index
    raise TriforceError(
        f"torch does not see the GPU that the driver reports: {', '.join(dict.fromkeys(found))}",
        "`triforce doctor` says why; --gpu cpu measures the host alone",
    )


def rates_text(measured: Measured, chosen: Profile | None, hardware: Hardware | None) -> str:
    """Return a line for each rate: measured, and in the profile or, for the host, what is assumed without one."""
    columns = (Column(""), Column("measured", right=True), Column("profile", right=True), Column(""))
    rows = table(columns, list(_rows(measured, chosen, hardware)), None).plain
    when = f"measured on {measured.date} with torch {measured.torch}"
    return f"{measured.machine}; {when}\n\n{rows}\n"


def _rows(measured: Measured, chosen: Profile | None, hardware: Hardware | None) -> Iterator[tuple[str, str, str, str]]:
    assumed = {} if hardware is None else {"GB/s": hardware.host_bandwidth, "GFLOP/s bf16": hardware.host_flops}
    for part, rate, name, unit in _RATES:
        own, sheet = (getattr(getattr(source, part, None), rate, None) for source in (measured, chosen))
        if getattr(measured, part) is None or (name == "disk" and own is None):
            continue
        expected = _number(sheet)
        if sheet is None and part == "host" and name != "disk" and unit in assumed:
            expected = f"{_number(assumed[unit] / 1e9)} assumed"
        yield name, _number(own), expected, unit


def _number(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"
