"""A model whose files have been found: its shapes, what computes it, and the memory that it takes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec

import torch

from ..architecture.config import ModelShape
from ..architecture.dims import Dimensions
from ..architecture.footprint import Where, chunk_of
from ..architecture.parameters import WeightBits
from ..errors import SettingsError
from ..kernels.ops import Operations, choose_operations
from ..loading.formats.safetensors import Checkpoint
from ..loading.formats.tensor_checks import average_bits
from ..loading.heads import HeadCheckpoint
from ..loading.quantization_checks import check_kv, check_packed_kv, missing_kernel
from ..memory.factory import host_kernel
from ..parallel import ALONE, Group, Share, split
from ..planning.batch import fitting_sequences, kv_room
from ..planning.memory import USABLE, MemoryEstimate, check_fit, estimate
from ..settings.config import EngineConfig, Speculation
from ..settings.kv_formats import KV_FORMATS, PACKED_KV, PLAIN_KV
from ..settings.method_sizes import has_middle
from ..system.machine import free_memory


@dataclass(frozen=True)
class FoundModel:
    """The files of a model, where it is to run, and how: what can be known before anything is loaded."""

    config: EngineConfig
    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype
    speculation: Speculation
    draft: Checkpoint | None  # of the draft model, if the method uses one
    group: Group = ALONE  # the ranks that share the model; each loads the whole draft model

    @cached_property
    def share(self) -> Share | None:
        """Return this rank's share of the model; None for all of it. Raises SettingsError for too many ranks."""
        return None if self.group.size == 1 else split(self.checkpoint.shape, self.group.rank, self.group.size)

    @property
    def shape(self) -> ModelShape:
        """Return the shape of the part of the model in this rank's memory."""
        return self.checkpoint.shape if self.share is None else self.share.stored

    @property
    def draft_dimensions(self) -> Dimensions | None:
        """Return the dimensions of the draft model, or of the head that drafts; None without one."""
        if self.draft is None:
            return None
        return self.draft.dimensions if isinstance(self.draft, HeadCheckpoint) else self.draft.shape

    @property
    def kernel(self) -> str:
        """Return the level of the native kernel that will be used; "off" if torch computes."""
        kernel = self._operations(self.shape).kernel
        return "off" if kernel is None else kernel.level

    @cached_property
    def weight_bits(self) -> WeightBits:
        """Return the average bits of a weight in memory, inside and outside of the layers."""
        quantized = {}
        if self._operations(self.shape).serves_quantized(self.dtype):
            quantized = self.checkpoint.quantized_bits()
        return average_bits(self.checkpoint.sizes(), quantized, self.dtype.itemsize)

    def estimate(self, tokens: int) -> MemoryEstimate:
        """Estimate the memory for a sequence of `tokens` whose KV cache is completely on this device."""
        return estimate(
            self.shape,
            tokens,
            self.speculation,
            device=self.device.type,
            itemsize=self.dtype.itemsize,
            prefill_chunk=self.config.prefill_chunk,
            draft=self.draft_dimensions,
            in_place=self._retrieves_in_place,
            weight_bits=self.weight_bits,
            kv=self.config.kv,
        )

    @property
    def _retrieves_in_place(self) -> bool:
        """Return whether the retrieval cache copies nothing where all KV is on the device."""
        if self.device.type == "cpu":
            return self.kernel != "off"
        return KV_FORMATS[self.config.kv] is PLAIN_KV and find_spec("triton") is not None

    def selected_chunk(self, settings: Speculation, tokens: int, offloaded: bool) -> int | None:
        """Return how many tokens are selected together in a sequence of up to `tokens`; None if nothing is selected.

        `offloaded`: whether keys and values may lie outside of the device.
        """
        if not has_middle(settings, tokens):
            return None
        where = Where(self.device.type, offloaded, self._retrieves_in_place, self.config.kv)
        return chunk_of(settings, tokens, where, in_blocks=where.device != "cpu" or self.kernel != "off")

    def check_fit(self, tokens: int, memory_limit: int | None = None) -> None:
        """Raise OutOfMemory if a sequence of `tokens` does not fit the device, or `memory_limit` bytes of it."""
        may_pack = KV_FORMATS[self.config.kv] is PLAIN_KV and self.packs and self.device.type != "cpu"
        check_fit(self.estimate(tokens), self._usable(memory_limit), may_pack)

    def fitting_sequences(self, tokens: int, memory_limit: int | None = None, shared: int = 0) -> int:
        """Return how many sequences of up to `tokens` fit the device together, or `memory_limit` bytes of it.

        The first `shared` tokens of all are the same, and in memory once. Call it before the weights are loaded.
        """
        return fitting_sequences(self.estimate(tokens), self._usable(memory_limit), shared)

    def kv_room(self, tokens: int, memory_limit: int | None = None, spare: int = 0) -> Callable[[int], int]:
        """Return what returns how many bytes keys and values may take, given how many sequences run together.

        They have up to `tokens` each, within `memory_limit`, as in `fitting_sequences`, beside `spare` further ones.
        """
        return partial(kv_room, self.estimate(tokens), self._usable(memory_limit), spare=spare)

    def _usable(self, memory_limit: int | None) -> int:
        free = int(free_memory(self.device) * USABLE)
        if self.device.type == "cpu":
            free //= self.group.mates
        return free if memory_limit is None else min(free, memory_limit)

    @property
    def packs(self) -> bool:
        """Return whether keys and values can be packed over tiers."""
        shape, missing = self.checkpoint.shape, None
        if self.device.type != "cpu":
            missing = missing_kernel(self.device, self.dtype, self.shape.head_dim, self.kernel)
        try:
            check_packed_kv(PACKED_KV.name, shape, self.device, self.dtype, self.kernel)
            check_kv(PACKED_KV.name, shape, missing)
        except SettingsError:
            return False
        return self._unpacks

    @property
    def _unpacks(self) -> bool:
        """Return whether the native kernel reads packed pages in host memory."""
        shape = self.checkpoint.shape.full_attention
        return self.device.type == "cpu" or host_kernel(shape, self.dtype) is not None

    def _operations(self, shape: ModelShape) -> Operations:
        """Return the operations of one model, which own its result buffers. Raises SettingsError."""
        return choose_operations(self.config.kernel, shape, self.dtype, self.device)
