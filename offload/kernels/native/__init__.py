"""The native kernel: attention where the keys are, and the rest of a decoder layer, at the speed of the memory."""

from .kernel import Kernel, find_kernel
from .library import LEVELS, KernelUnavailable

__all__ = ["LEVELS", "Kernel", "KernelUnavailable", "find_kernel"]
