"""The native CPU kernel, in C: attention over blocks of keys and values, linears, norms, at memory bandwidth."""

from .kernel import Kernel, find_kernel
from .library import LEVELS, KernelUnavailable
from .threads import generate_on_one_thread, torch_on_one_thread, use_threads

__all__ = [
    "LEVELS",
    "Kernel",
    "KernelUnavailable",
    "find_kernel",
    "generate_on_one_thread",
    "torch_on_one_thread",
    "use_threads",
]
