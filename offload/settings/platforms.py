"""What triforce runs on, in the words of the README, and the names of hardware on which it does not."""

import re

RUNS_ON = (
    "Linux, CPU: runs, and every test runs there",
    "Linux, NVIDIA GPU (CUDA): runs by design; no GPU has been measured yet (docs/gpu.md)",
    "Linux on 64-bit ARM, CPU: the native kernel runs right under an emulator; no such machine has run it",
    "macOS, CPU: untested, though nothing is known to need Linux. Apple GPUs (MPS) are not supported",
    "Windows: untested; generate does not start, for it needs fcntl. WSL 2 is Linux",
    "AMD (ROCm) and Intel GPUs: not supported; --gpu cpu and --device cpu use the CPU beside them",
)
_OTHERS = (
    r"m[1-9](pro|max|ultra)?|mps|metal|mlx|apple.*|mac.*",
    r"rocm|hip|amd.*|radeon.*|rx\d{4}.*|\d{4}x(t|tx)|w[67]\d00|mi\d{2,3}[ax]?|gfx\d+|strix.*",
    r"xpu|intel.*|arc.*|[ab][357][578]0|oneapi|sycl|gaudi.*|hpu",
    r"tpu.*|npu|vulkan|opencl|directml|dml|windows|snapdragon.*",
)


def is_other_platform(name: str) -> bool:
    """Return whether a name is that of hardware or of an interface which is not supported, such as m2 or 7900xtx."""
    return re.fullmatch("|".join(_OTHERS), re.sub(r"[^a-z0-9]", "", name.lower())) is not None
