"""The GPUs that the driver reports, found without importing torch, so that a plan is printed at once."""

import subprocess
from importlib.metadata import version
from pathlib import Path
from shutil import which

_DRIVER = Path("/proc/driver/nvidia/gpus")
_DEVICE_FILES = Path("/dev")
_DEVICES = ("nvidia*", "nvhost-gpu", "dxg", "kfd")  # of NVIDIA's drivers, of Tegra, of WSL and of AMD
_TIMEOUT_S = 10  # a driver without persistence mode takes a few seconds to start


def gpu_names(visible: str | None = None) -> list[str]:
    """Return the models of the NVIDIA GPUs, as the driver reports them, in its order; empty without any.

    Args:
        visible: the value of CUDA_VISIBLE_DEVICES, None if it is not set. Of GPUs given by UUID only the number counts.
    """
    names = _from_driver_files(_DRIVER) or _from_program()
    if visible is None:
        return names
    wanted = [number.strip() for number in visible.split(",") if number.strip()]
    if not all(number.isdecimal() for number in wanted):
        return names[: len([number for number in wanted if number != "-1"])]
    inside = [int(number) for number in wanted if int(number) < len(names)]
    return [names[index] for index in inside]


def may_have_gpus() -> bool:
    """Return whether torch may see a GPU: False is certain, and saves the import of torch, which takes seconds."""
    if any(next(_DEVICE_FILES.glob(pattern), None) is not None for pattern in _DEVICES):
        return True
    return bool(_from_driver_files(_DRIVER)) or which("nvidia-smi") is not None or "rocm" in version("torch")


def _from_driver_files(folder: Path) -> list[str]:
    """Return the models in the driver's files on Linux, one for each GPU, with a line `Model: NVIDIA H200`."""
    try:
        texts = [(gpu / "information").read_text() for gpu in sorted(folder.iterdir())]
    except OSError:  # no driver, or a container that hides it
        return []
    lines = [line.partition(":") for text in texts for line in text.splitlines()]
    return [value.strip() for name, _, value in lines if name.strip() == "Model"]


def _from_program() -> list[str]:
    program = which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):  # without a working driver it fails
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]
