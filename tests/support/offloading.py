"""Tiny models whose full cache is spread over tiers, over a simulated link that poisons and delays."""

from __future__ import annotations

import ctypes
import random
import time
from dataclasses import dataclass
from typing import ClassVar

import torch

from offload.kernels.native import KernelUnavailable, find_kernel
from offload.kernels.native.ops import NativeOperations
from offload.kernels.ops import TorchOperations
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.weights import load_model
from offload.memory.disk_link import DiskLink, StagedLink
from offload.memory.factory import TieredStoreFactory
from offload.memory.host_memory import host_memory
from offload.memory.link import SimulatedLink
from offload.memory.tier_settings import TierSettings
from tests.support.models import make_hf_model

CPU = torch.device("cpu")
PAGE, CAPACITY = 64, 700
SHAPE = {"head_dim": 32, "num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 3, "hidden_size": 96}


@dataclass(frozen=True)
class SmallPages(TierSettings):
    """Tiers with pages of any size, so that a short sequence has several; the bits are not those of a single store.

    Pages are copied one by one, unless `copy_bytes` says otherwise.
    """

    page_unit: ClassVar[int] = 1
    buffers: int = 2
    copy_bytes: int = 1


def native_kernel():
    try:
        return find_kernel()
    except KernelUnavailable:
        return None


def make_model(folder, dtype=torch.float32, native=True, **changes):
    """Make a tiny model on the native kernel, or on torch's operations."""
    make_hf_model("llama", **SHAPE | changes).save_pretrained(folder)
    kernel = native_kernel() if native else None
    operations = TorchOperations() if kernel is None else NativeOperations(kernel)
    return load_model(FolderCheckpoint(folder), dtype, CPU, lambda done, total: None, operations)


def random_delays(seed, longest=0.002):
    """Return a callback that delays some copies at random."""
    rng = random.Random(seed)
    return lambda pairs: time.sleep(rng.random() * longest) if rng.random() < 0.3 else None


class Poisoned:
    """Mixed into a link: targets are NaN from the submission of a copy on, so that tests notice a missing wait."""

    _last = None

    def copy(self, pairs, after=None):
        if self._last is not None:
            self._last.done.wait()  # an earlier copy may have yet to read what is filled here
        for target, _ in pairs:
            if isinstance(target, torch.Tensor):
                ctypes.memset(target.data_ptr(), 255, target.nbytes)  # NaN in every floating-point type
        self._last = super().copy(pairs, after)
        return self._last


class LateLink(SimulatedLink):
    """A link that calls `before` with the pairs before it copies them: it may delay them, or fail."""

    def __init__(self, bandwidth=1e9, before=None):
        self._before = before or (lambda pairs: None)
        super().__init__(bandwidth)

    def transfer(self, ticket):
        self._before(ticket.pairs)
        super().transfer(ticket)


class PoisonedLink(Poisoned, LateLink):
    pass


class PoisonedDisk(Poisoned, DiskLink):
    pass


def make_link(before=None, bandwidth=1e12):
    return PoisonedLink(bandwidth, before)


def staged_link(**options):
    """Return the link of a simulated device beside a disk; some of its copies are late."""
    return StagedLink(make_link(**{"before": random_delays(0)} | options), CPU, host_memory)


def tiered_cache(model, settings, link=None, capacity=CAPACITY):
    """Make a full cache over tiers, in the native kernel's blocks if the model uses it."""
    factory = TieredStoreFactory(model.operations, CPU, settings, link or make_link())
    store = factory.new_store(model.shape, capacity, model.dtype)
    return model.new_cache(capacity, store=store)


def settings(mode="stream", resident=0, **rest):
    return SmallPages(mode=mode, resident_layers=resident, **{"page_tokens": PAGE} | rest)
