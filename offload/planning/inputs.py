"""The inputs of a plan: a model, a sequence length, the hardware, and what the kernels there can do."""

from dataclasses import dataclass, field

from ..architecture.dims import Dimensions, WeightBits
from ..architecture.kv_formats import stored_bytes
from ..hardware.rates import Hardware
from ..settings.config import Placement, Speculation
from ..settings.kv_formats import BF16, KV_FORMATS, PACKED_KV, PLAIN_KV, KVFormat
from ..settings.method_sizes import middle_tokens
from ..settings.placement_settings import PLANES


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """A model, a sequence length and the hardware that a plan is made for.

    Args:
        model: the name for messages and for --model.
        shape: the model's dimensions.
        tokens: prompt and answer together.
        itemsize: bytes of a weight, and of an element of the KV cache.
        draft: the draft model's dimensions, if Speculation names one.
        acceptance: rate at which the full cache accepts the retrieval level's tokens; None for the published one.
        draft_acceptance: rate at which the retrieval level accepts the draft's tokens; None for the published one.
        lists_chunks: whether attention reads a list of a plain cache's chunks in place, so that the retrieval cache
            needs no copies; None: on a GPU it does (Triton), on a CPU it does not.
        weight_bits: of quantised weights; None for weights of `itemsize` bytes.
        quantize: the level to which loading rounds the weights: q4, q5, q6, q8.
        kv: the format of the full cache's keys and values.
        packs: whether they can be packed over tiers: a kernel there reads them, and the model computes in bf16.
        packs_on_device: whether AUTO may pack all of them in the memory of one GPU, where they would not fit otherwise.
        auto_packed: whether AUTO has packed them for the tiers: in the device's memory alone they would not be packed.
        sequences: how many sequences run together, each of `tokens`.
        shared: tokens of their common beginning, which is in the KV cache once where all of it is on the device.
        host_computes: whether the native kernel runs on the host: without it, experts run there only if asked for.
    """

    model: str
    shape: Dimensions
    tokens: int
    hardware: Hardware
    placement: Placement = field(default_factory=Placement)
    speculation: Speculation = field(default_factory=Speculation)
    prefill_chunk: int = 2048
    itemsize: int = 2
    draft: Dimensions | None = None
    acceptance: float | None = None
    draft_acceptance: float | None = None
    lists_chunks: bool | None = None
    weight_bits: WeightBits | None = None
    quantize: str | None = None
    kv: str = BF16
    packs: bool = False
    packs_on_device: bool = False
    auto_packed: bool = False
    sequences: int = 1
    shared: int = 0
    host_computes: bool = True

    @property
    def is_quantized(self) -> bool:
        """Return whether the target's weights are quantised."""
        return self.bits.is_quantized(self.itemsize)

    @property
    def budget(self) -> int:
        """Return the tokens that a retrieval cache has."""
        return middle_tokens(self.speculation, self.tokens)

    @property
    def bits(self) -> WeightBits:
        """Return the bits of the target's weights."""
        return self.weight_bits or WeightBits.of_dtype(self.itemsize)

    def kv_bytes(self, tokens: int) -> float:
        """Return the bytes of keys and values of all layers that a pass over `tokens` tokens reads."""
        return stored_bytes(self.shape, self.kv, tokens, self.itemsize)

    @property
    def kv_format(self) -> KVFormat:
        """Return the format of the full cache's keys and values."""
        return KV_FORMATS[self.kv]

    @property
    def has_planes(self) -> bool:
        """Return whether plane A of packed keys and values is on the device, and plane B of offloaded ones away."""
        return self.placement.offload == PLANES and self.kv_format is PACKED_KV

    def in_place(self, offloaded: int) -> bool:
        """Return whether the retrieval cache copies nothing where `offloaded` layers have their KV in host memory."""
        if self.has_planes:
            return True
        on_cpu, is_plain = self.hardware.shared, self.kv_format is PLAIN_KV
        lists_plain = not on_cpu if self.lists_chunks is None else self.lists_chunks
        has_list = lists_plain if is_plain else on_cpu  # of other formats, the native kernel alone reads a list
        return has_list and not offloaded

    @property
    def has_one_memory(self) -> bool:
        """Return whether device and host are the same memory, with nothing to copy: a CPU without a simulated link."""
        return self.hardware.shared and self.placement.link_gb_s is None

    @property
    def may_host_experts(self) -> bool:
        """Return whether experts may be in host memory."""
        placement = self.placement
        if self.shape.experts is None or self.has_one_memory or placement.experts == "device":
            return False
        return placement.experts == "host" or (self.host_computes and placement.offload != "none")
