"""The table of formats in which keys and values are kept: all that is asked about one by its name.

A new format is a new row, beside the file of its store. Imports nothing heavy.
"""

from dataclasses import dataclass
from typing import Any

from .methods import load_class
from .validation import require

AUTO, BF16 = "auto", "bf16"


@dataclass(frozen=True, slots=True)
class KVFormat:
    """A format of keys and values, `--kv`.

    `run` tokens of a KV head are encoded together, a divisor of the 128 that a store keeps as they are until they are
    complete. A run has `bits` for each number, and a header of `channel_bytes` for each dimension of the head,
    `token_bytes` for each token, and `reserve` bytes: room that is always there for numbers which do not fit their
    bits. Headers are multiples of `align` bytes.

    One that is not `lossy` gives back every bit, so it changes no answer. `rate` is the share of a memory's rate at
    which attention reads it. `native` and `triton` are the stores that the kernels attend to, as module:name, imported
    when they are used. None: that kernel does not read the format in one memory.
    """

    name: str
    bits: int = 16
    run: int = 1
    channel_bytes: int = 0
    token_bytes: int = 0
    reserve: int = 0
    align: int = 1
    lossy: bool = True
    rate: float = 1.0
    native: str | None = None
    triton: str | None = None

    @property
    def grain(self) -> int:
        """Return the tokens that are always selected together, without those of a block of the native kernel."""
        return self.run if self.lossy else 1

    def run_bytes(self, head_dim: int) -> int:
        """Return the bytes of a run's keys and values of one head."""
        header = self.channel_bytes * head_dim + self.token_bytes * self.run + self.reserve
        return -(-header // self.align) * self.align + 2 * self.run * head_dim * self.bits // 8

    def number_bits(self, head_dim: int) -> float:
        """Return the bits of a number, with its part of the header."""
        return 8 * self.run_bytes(head_dim) / (2 * self.run * head_dim)

    def store(self, is_native: bool) -> Any:
        """Return the class of stores for the native kernel, or for Triton's."""
        cls = self.native if is_native else self.triton
        assert cls is not None, f"no kernel reads {self.name} there"
        return load_class(cls)


PLAIN_KV = KVFormat(BF16, lossy=False)  # as the model computes them, also in fp32
# bf16 without loss: an exponent for each channel of the keys, two of the values, and 30 numbers apart.
PACKED_KV = KVFormat(
    "packed",
    12,
    128,
    3,
    reserve=128,
    align=64,
    lossy=False,
    triton="offload.memory.device_packed_store:DevicePackedStore",
)
PLANE_KV = KVFormat("plane", 8, 128, 3, reserve=128, align=64)  # the part of a packed one that a middle level reads
KV_FORMATS = {
    format.name: format
    for format in (
        PLAIN_KV,
        PACKED_KV,
        PLANE_KV,
        # Scales and middles in bf16 for each channel of keys and each token of values, and codes of 8 bits. On two
        # cores one query token over 8,192 takes 1/1.37 of the time of bf16 for 0.53 of its bytes.
        KVFormat(
            "q8",
            8,
            32,
            4,
            4,
            rate=0.73,
            native="offload.memory.quantized_store:QuantizedStore",
            triton="offload.memory.device_quantized_store:DeviceQuantizedStore",
        ),
    )
}
KV_FORMATS[AUTO] = PLAIN_KV  # in one memory; over tiers see `tiered_format`
PACKED_DIMS = 32  # heads whose keys and values can be packed have a multiple of it
LOSSY_KV = tuple(name for name, format in KV_FORMATS.items() if format.lossy and format is not PLANE_KV)


def full_formats() -> tuple[str, ...]:
    """Return the names of the formats that a full cache may have, AUTO first."""
    return AUTO, *(name for name, format in KV_FORMATS.items() if format is not PLANE_KV and name != AUTO)


def tiered_format(kv: str, packs: bool) -> str:
    """Return the format of keys and values over tiers; `packs`: whether they can be packed there.

    AUTO packs them: what a link or a disk copies is what a pass waits for.
    """
    return PACKED_KV.name if kv == AUTO and packs else BF16 if KV_FORMATS[kv] is PLAIN_KV else kv


def check_planes(kv: str) -> None:
    """Raise SettingsError if keys and values over tiers are not packed, and shall lie in planes."""
    require(
        KV_FORMATS[kv] is PACKED_KV,
        "--offload planes divides packed keys and values, and these are not packed",
        "use --offload auto, or --kv packed, which says why if they cannot be packed",
    )


def saved_format(kv: str) -> str:
    """Return the format of keys and values in files: as the model computes them, if they come back bit for bit."""
    return kv if KV_FORMATS[kv].lossy else BF16
