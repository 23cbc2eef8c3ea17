"""A model whose files have been found and checked: what it refuses, and how it is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ..architecture.config import ModelShape
from ..architecture.known_models import sibling_of
from ..architecture.weight_formats import level_of
from ..architecture.yarn import factor_for, stretched
from ..constraints.vocabulary import ConstraintVocabulary
from ..engine import Engine
from ..errors import SettingsError
from ..kernels.native import use_threads
from ..kernels.ops import Operations, choose_operations
from ..kernels.triton.warm_up import Needs, warm_up
from ..loading.agreement import agreement
from ..loading.formats.quantization import QuantizedCheckpoint
from ..loading.heads import HeadCheckpoint
from ..loading.prompt_checks import new_tokens_in_context
from ..loading.quantization_checks import (
    check_kv,
    check_packed_kv,
    missing_kernel,
)
from ..loading.tokenizers.tokenizer import Tokenizer
from ..loading.tokenizers.vocabulary import check_draft, tokens_containing
from ..loading.weights import Progress, load_model
from ..loading.weights_digest import weights_digest
from ..memory.factory import TieredStoreFactory, check_model, make_link
from ..memory.link import Link
from ..memory.tier_settings import TierSettings
from ..model.decoder import Model
from ..model.heads import Head
from ..model.warm_up import warm_up_model
from ..prompt_cache.fingerprint import LEAST
from ..prompt_cache.folder import PromptFolder
from ..prompt_cache.prefill import PromptCache
from ..settings.config import Sampling
from ..settings.generation import DRY_BREAKERS
from ..settings.kv_formats import KV_FORMATS, PACKED_KV, PLAIN_KV, check_planes, tiered_format
from ..settings.method_sizes import check_approximate, check_forgetting, check_middle, check_trees, forgets
from ..settings.placement_settings import PLANES
from ..weight_offloading.experts import ExpertTier
from ..weight_offloading.layer_stream import WeightTier
from .found_model import FoundModel


@dataclass(frozen=True)
class OpenModel(FoundModel):
    """Describe a model whose files have been found and checked, and load it: until `load`, no weights are in memory."""

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
        return self if factor <= 1 else self._with_shape(stretched(self.checkpoint.shape, factor))

    def _with_shape(self, shape: ModelShape) -> OpenModel:
        checkpoint = copy(self.checkpoint)
        checkpoint.shape = shape
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
        self._check_tiers(tiers)
        use_threads(self.config.threads)
        link = weights = None
        if tiers is not None:
            link = make_link(self.device, tiers.link_gb_s, tiers.disk is not None)
            weights = self._weight_tier(tiers, link)
        do = self._operations(self.shape)
        kv = tiered_format(self.config.kv, self.packs)
        stores = None if tiers is None else TieredStoreFactory(do, self.device, tiers, link, kv=kv)
        if stores is not None and capacity and self.device.type == "cuda":
            stores.reserve(self.checkpoint.shape if self.share is None else self.share.shape, capacity, self.dtype)
        where = self.dtype, self.device, progress
        model = load_model(self.checkpoint, *where, do, weights, self.group, self.share)
        draft = self._load_draft(progress, model)
        model.kv = self.config.kv
        if self.device.type == "cuda":
            self._compile(model, draft, tiers, capacity)
        eos_ids, chunk = self.checkpoint.shape.eos_ids, self.config.prefill_chunk
        more = (prompts, lambda: self.dry_breakers, self.constraints)
        return Engine(model, eos_ids, chunk, draft, stores, *more)

    def _compile(self, model: Model, draft: object, tiers: TierSettings | None, capacity: int) -> None:
        """Compile Triton's kernels before the first token, where they attend."""
        chunk = self.selected_chunk(self.speculation, capacity or model.shape.context, tiers is not None)
        table = chunk if tiers is None and self._retrieves_in_place else None
        kv = self.config.kv if tiers is None else tiered_format(self.config.kv, self.packs)
        has_planes = tiers is not None and tiers.mode == PLANES
        own = Needs(kv, table or 0, tiers is not None, has_planes, tiers is None)
        for each, needs in ((model, own), (draft, Needs())):
            if isinstance(each, Model):  # a head has what the model has
                warm_up(each.shape.full_attention, self.dtype, self.device, needs)
                warm_up_model(each)

    def _weight_tier(self, tiers: TierSettings, link: Link) -> WeightTier | None:
        """Return where weights are that do not all stay on the device; None if they do."""
        if tiers.experts == "device":
            return None if tiers.weight_layers is None else WeightTier(tiers.weight_layers, link)
        experts = ExpertTier(tiers.expert_layers, link, self._host_operations, tiers.expert_rows)
        return WeightTier(self.shape.layers, link, experts)

    @property
    def _host_operations(self) -> Operations:
        return choose_operations(self.config.kernel, self.shape, self.dtype, torch.device("cpu"))

    @property
    def host_computes(self) -> bool:
        """Return whether the native kernel can run experts on the host, beside the device."""
        return self._host_operations.kernel is not None

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

    def _check_tiers(self, tiers: TierSettings | None) -> None:
        """Raise SettingsError for models, experts and quantised copies of keys and values that tiers do not have."""
        check_middle(self.speculation, tiers is not None and tiers.mode == PLANES)
        if tiers is not None:
            check_model(self.checkpoint.shape)
            self.check_experts(tiers.experts)
            if tiers.experts != "device" and tiers.weight_layers is not None:
                raise SettingsError(
                    "experts in host memory do not go with other weights there",
                    "leave weight_layers out, or use experts=device",
                )
            if tiers.mode == PLANES:
                check_planes(tiered_format(self.config.kv, self.packs))
            if KV_FORMATS[self.config.kv] is PACKED_KV and not self._unpacks:
                raise SettingsError(
                    f"--kv {self.config.kv} needs the native kernel, too, for a GPU's offloaded keys and values",
                    "leave --kv out, or offloading; triforce doctor says more about the kernel",
                )

    def prompt_cache(self, folder: PromptFolder, least: int = LEAST) -> PromptCache:
        """Return the cache of this model's prompts of at least `least` tokens, in a folder.

        Reads the weight files once, for their fingerprint. Raises OSError if the folder cannot be created.
        """
        folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        digest = weights_digest(self.checkpoint.files(), folder.path / "weights.json")
        if self.checkpoint.quantization:
            digest = f"{digest} {self.checkpoint.quantization}"
        return PromptCache(folder, digest, self.config.model, least, self.group)

    def agreement(self, model: Model, ids: Sequence[int]) -> float | None:
        """Return the share of the prompt's last tokens after which a loaded, quantised model chooses as its original.

        Call it only with `config.quantize`. It reads all weights once more, and takes memory for embedding, head and
        one layer of them: None if a GPU has too little.
        """
        assert isinstance(self.checkpoint, QuantizedCheckpoint)
        try:
            return agreement(model, self.checkpoint, ids, self._operations(self.shape), self.share)
        except torch.OutOfMemoryError:
            return None

    def _load_draft(self, progress: Progress, target: Model) -> Model | Head | None:
        if self.draft is None:
            return None
        if isinstance(self.draft, HeadCheckpoint):
            target.tap(self.draft.head.taps)
            operations = self._operations(self.draft.shape)
            level = level_of(self.weight_bits.layers) if operations.serves_quantized(self.dtype) else None
            return self.draft.load(target, operations, level)
        draft = load_model(self.draft, self.dtype, self.device, progress, self._operations(self.draft.shape))
        draft.bar(self.barred)
        return draft

    def check_kv(self) -> None:
        """Raise SettingsError for caches and trees that some layers do not have, or that no kernel attends to."""
        shape, kv, settings = self.checkpoint.shape, self.config.kv, self.speculation
        check_approximate(settings, shape.family, not shape.is_uniform)
        models = filter(None, (self.checkpoint, self.draft))
        check_trees(settings, any(model.shape.linear for model in models), shape.vocab)
        missing = None
        if KV_FORMATS[kv] is not PLAIN_KV:
            missing = missing_kernel(self.device, self.dtype, self.shape.head_dim, self.kernel)
        check_packed_kv(kv, shape, self.device, self.dtype, self.kernel)
        check_kv(kv, shape, missing)

    def check_kernel(self) -> None:
        """Raise SettingsError if the configured level cannot run both models."""
        drafts = [] if self.draft is None else [("the draft model: ", self.draft.shape)]
        for name, shape in (("", self.shape), *drafts):
            try:
                self._operations(shape)
            except SettingsError as error:
                raise SettingsError(name + error.message, error.hint) from error
