"""A model whose files have been found and checked: its shapes, its memory, what it refuses, and how it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.util import find_spec

import torch

from ..architecture.config import ModelShape
from ..architecture.dims import Dimensions, WeightBits
from ..architecture.known_models import sibling_of
from ..architecture.yarn import factor_for, stretched
from ..constraints.vocabulary import ConstraintVocabulary
from ..engine import Engine
from ..errors import SettingsError
from ..hardware.rates import unrated
from ..kernels.ops import Operations, choose_operations
from ..loading.formats.checkpoint import Checkpoint
from ..loading.formats.tensor_checks import average_bits
from ..loading.heads import HeadCheckpoint
from ..loading.prompt_checks import new_tokens_in_context
from ..loading.quantization_checks import check_kv, check_packed_kv, missing_kernel
from ..loading.tokenizers.tokenizer import Tokenizer
from ..loading.tokenizers.vocabulary import check_draft, tokens_containing
from ..loading.weights import Progress
from ..loading.weights_digest import weights_digest
from ..memory.factory import host_kernel
from ..memory.tier_settings import TierSettings
from ..parallel import ALONE, Group, Share, split
from ..planning.batch import fitting_sequences, kv_room
from ..planning.inputs import PlanInputs
from ..planning.memory import USABLE, Tier, check_fit, chunk_of, estimate
from ..prompt_cache.fingerprint import LEAST
from ..prompt_cache.folder import PromptFolder
from ..prompt_cache.prompt import PromptCache
from ..settings.config import EngineConfig, Sampling, Speculation
from ..settings.generation import DRY_BREAKERS
from ..settings.kv_formats import KV_FORMATS, PACKED_KV, PLAIN_KV
from ..settings.method_sizes import check_approximate, check_forgetting, check_trees, forgets, has_middle
from ..system.machine import free_memory
from .loading import load_engine


@dataclass(frozen=True)
class OpenModel:
    """Describe a model whose files have been found and checked, and load it: until `load`, no weights are in memory."""

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

    def operations(self, shape: ModelShape) -> Operations:
        """Return the operations of one model, which own its result buffers. Raises SettingsError."""
        return choose_operations(self.config.kernel, shape, self.dtype, self.device)

    @property
    def kernel(self) -> str:
        """Return the level of the native kernel that will be used; "off" if torch computes."""
        kernel = self.operations(self.shape).kernel
        return "off" if kernel is None else kernel.level

    @property
    def host_operations(self) -> Operations:
        """Return the operations of experts on the host, beside the device."""
        return choose_operations(self.config.kernel, self.shape, self.dtype, torch.device("cpu"))

    @property
    def host_computes(self) -> bool:
        """Return whether the native kernel can run experts on the host, beside the device."""
        return self.host_operations.kernel is not None

    @cached_property
    def weight_bits(self) -> WeightBits:
        """Return the average bits of a weight in memory, inside and outside of the layers."""
        quantized = {}
        if self.operations(self.shape).serves_quantized(self.dtype):
            quantized = self.checkpoint.quantized_bits()
        return average_bits(self.checkpoint.sizes(), quantized, self.dtype.itemsize)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer, loading it on first use. Raises CheckpointError."""
        return self.checkpoint.load_tokenizer()

    @cached_property
    def barred(self) -> list[int]:
        """Return the ids that the draft model must not propose. Raises SettingsError if it cannot draft."""
        assert self.draft is not None, "only a draft model is barred from ids"
        if isinstance(self.draft, HeadCheckpoint) and not self.draft.has_tokenizer:
            return []  # its ids are the target's
        sibling = sibling_of(self.config.model, self.checkpoint.shape)
        return check_draft(self.tokenizer, self.draft.load_tokenizer(), self.draft.shape, self.speculation, sibling)

    @property
    def sampling(self) -> Sampling:
        """Return the model's own sampling defaults."""
        return Sampling.from_generation_config(self.checkpoint.generation)

    @cached_property
    def dry_breakers(self) -> frozenset[int]:
        """The ids of DRY's sequence breakers."""
        return tokens_containing(self.tokenizer.vocabulary, DRY_BREAKERS)

    @cached_property
    def constraints(self) -> ConstraintVocabulary:
        """What makes the masks of constrained answers; a constraint may be checked before the model is loaded."""
        shape = self.checkpoint.shape
        return ConstraintVocabulary(lambda: self.tokenizer, shape.vocab, shape.eos_ids)

    def plan_inputs(self, tokens: int, sequences: int = 1, shared: int = 0) -> PlanInputs:
        """Return the inputs of a plan for sequences of `tokens` on a device with all weights and KV, without rates."""
        return PlanInputs(
            self.config.model,
            self.shape,
            tokens,
            unrated(self.device.type),
            speculation=self.speculation,
            prefill_chunk=self.config.prefill_chunk,
            itemsize=self.dtype.itemsize,
            draft=self.draft_dimensions,
            lists_chunks=self.kernel != "off" if self.device.type == "cpu" else find_spec("triton") is not None,
            weight_bits=self.weight_bits,
            kv=self.config.kv,
            sequences=sequences,
            shared=shared,
        )

    def estimate(self, tokens: int, sequences: int = 1) -> Tier:
        """Estimate the memory for sequences of `tokens` each, whose KV caches are completely on this device."""
        return estimate(self.plan_inputs(tokens, sequences))

    def selected_chunk(self, settings: Speculation, tokens: int, offloaded: bool) -> int | None:
        """Return how many tokens are selected together in a sequence of up to `tokens`; None if nothing is selected.

        `offloaded`: whether keys and values may lie outside of the device.
        """
        if not has_middle(settings, tokens):
            return None
        inputs = replace(self.plan_inputs(tokens), speculation=settings)
        in_blocks = self.device.type != "cpu" or self.kernel != "off"
        return chunk_of(inputs, int(offloaded), self.config.kv, in_blocks)

    def check_fit(self, tokens: int, memory_limit: int | None = None) -> None:
        """Raise OutOfMemory if a sequence of `tokens` does not fit the device, or `memory_limit` bytes of it."""
        may_pack = KV_FORMATS[self.config.kv] is PLAIN_KV and self.packs and self.device.type != "cpu"
        check_fit(self.estimate(tokens), tokens, self._usable(memory_limit), may_pack)

    def fitting_sequences(self, tokens: int, memory_limit: int | None = None, shared: int = 0) -> int:
        """Return how many sequences of up to `tokens` fit the device together, or `memory_limit` bytes of it.

        The first `shared` tokens of all are the same, and in memory once. Call it before the weights are loaded.
        """
        return fitting_sequences(self.plan_inputs(tokens, shared=shared), self._usable(memory_limit))

    def kv_room(self, tokens: int, memory_limit: int | None = None, spare: int = 0) -> Callable[[int], int]:
        """Return a function of the number of sequences that run together: the bytes for their keys and values.

        They have up to `tokens` each, within `memory_limit`, as in `fitting_sequences`, beside `spare` further ones.
        """
        return partial(kv_room, self.plan_inputs(tokens), self._usable(memory_limit), spare=spare)

    def _usable(self, memory_limit: int | None) -> int:
        free = int(free_memory(self.device) * USABLE)
        if self.device.type == "cpu":
            free //= self.group.mates
        return free if memory_limit is None else min(free, memory_limit)

    def new_tokens(self, prompt_tokens: int, wanted: int, exact: bool) -> int:
        """Return how many tokens may follow the prompt: `wanted`, or unless `exact` what fits into the context.

        Raises PromptError with the numbers if the prompt exceeds the context, or with `exact` prompt and answer do.
        On a cache that forgets, everything fits; raises SettingsError if the cache exceeds the context.
        """
        if forgets(self.speculation):
            check_forgetting(self.speculation, self.checkpoint.shape.context)
            return wanted
        return new_tokens_in_context(self.checkpoint.shape, prompt_tokens, wanted, exact)

    def stretched(self, tokens: int) -> OpenModel:
        """Return the model with a context of at least `tokens`, extended by YaRN to a multiple of its own if need be.

        Raises UnsupportedModel if that is not possible.
        """
        factor = factor_for(self.checkpoint.shape, tokens)
        if factor <= 1:
            return self
        checkpoint = copy(self.checkpoint)
        checkpoint.shape = stretched(self.checkpoint.shape, factor)
        return replace(self, checkpoint=checkpoint)

    def load(
        self,
        progress: Progress = lambda done, total: None,
        tiers: TierSettings | None = None,
        prompts: PromptCache | None = None,
        capacity: int = 0,
    ) -> Engine:
        """Load the weights and return the engine.

        Args:
            progress: called after every layer.
            tiers: how the full KV cache is split between memories; None if it stays on the device.
            prompts: the cache of prompts on disk; None for none.
            capacity: tokens of the longest sequence, if it is known: host memory for them is pinned meanwhile.

        Raises SettingsError for quantised keys and values that tiers do not have.
        """
        return load_engine(self, progress, tiers, prompts, capacity)

    def prompt_cache(self, folder: PromptFolder, least: int = LEAST) -> PromptCache:
        """Return the cache of this model's prompts of at least `least` tokens, in a folder.

        Reads the weight files once, for their fingerprint. Raises OSError if the folder cannot be created.
        """
        folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        digest = weights_digest(self.checkpoint.files(), folder.path / "weights.json")
        if self.checkpoint.quantization:
            digest = f"{digest} {self.checkpoint.quantization}"
        return PromptCache(folder, digest, self.config.model, least, self.group)

    @property
    def packs(self) -> bool:
        """Return whether keys and values can be packed over tiers."""
        try:
            self._check_format(PACKED_KV.name, None if self.device.type == "cpu" else self._missing_kernel)
        except SettingsError:
            return False
        return self.unpacks

    @property
    def unpacks(self) -> bool:
        """Return whether the native kernel reads packed pages in host memory."""
        shape = self.checkpoint.shape.full_attention
        return self.device.type == "cpu" or host_kernel(shape, self.dtype) is not None

    @property
    def _missing_kernel(self) -> str | None:
        """Return the kernel that would attend to quantised keys and values and is missing; None if it is there."""
        return missing_kernel(self.device, self.dtype, self.shape.head_dim, self.kernel)

    def _check_format(self, kv: str, missing: str | None) -> None:
        """Raise SettingsError for a format of keys and values that some layers do not have, or that no kernel reads."""
        check_packed_kv(kv, self.checkpoint.shape, self.device, self.dtype, self.kernel)
        check_kv(kv, self.checkpoint.shape, missing)

    def check(self) -> None:
        """Raise SettingsError for a kernel, a cache or trees that the models cannot run, and a draft that cannot draft.

        All of it is known before the weights are loaded.
        """
        shape, kv, settings = self.checkpoint.shape, self.config.kv, self.speculation
        self.operations(self.shape)
        if self.draft is not None:
            try:
                self.operations(self.draft.shape)
            except SettingsError as error:
                raise SettingsError(f"the draft model: {error.message}", error.hint) from error
        check_approximate(settings, shape.family, not shape.is_uniform)
        models = filter(None, (self.checkpoint, self.draft))
        check_trees(settings, any(model.shape.linear for model in models), shape.vocab)
        if KV_FORMATS[kv] is not PLAIN_KV:
            self._check_format(kv, self._missing_kernel)
        if self.draft is not None:
            _ = self.barred  # raises what is wrong

    def check_experts(self, way: str) -> None:
        """Raise SettingsError for experts that cannot be in host memory, for the way host."""
        if way not in ("auto", "device") and self.checkpoint.shape.experts is None:
            raise SettingsError(
                f"--experts {way} is for a mixture of experts, and {self.config.model} has one MLP in each layer",
                "leave --experts out",
            )
        if way == "host" and not self.host_computes and self.weight_bits.is_quantized(self.dtype.itemsize):
            raise SettingsError(
                f"--experts {way} needs the native kernel for quantised weights, and it cannot be used on this host",
                "use --experts device; triforce doctor says more about the kernel",
            )
