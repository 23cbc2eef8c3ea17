"""Loads an opened model: its weights and tiers, the draft model, and the kernels that are compiled before a token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..architecture.weight_formats import level_of
from ..engine import Engine
from ..errors import SettingsError
from ..kernels.native import use_threads
from ..kernels.triton.warm_up import Needs, warm_up
from ..loading.heads import HeadCheckpoint
from ..loading.weights import Progress, load_model
from ..memory.factory import TieredStoreFactory, check_model, make_link
from ..memory.link import Link
from ..memory.tier_settings import TierSettings
from ..model.decoder import Model
from ..model.heads import Head
from ..model.warm_up import warm_up_model
from ..prompt_cache.prompt import PromptCache
from ..settings.kv_formats import KV_FORMATS, PACKED_KV, check_planes, tiered_format
from ..settings.method_sizes import check_middle
from ..settings.placement_settings import PLANES
from ..weight_offloading.experts import ExpertTier
from ..weight_offloading.layer_stream import WeightTier

if TYPE_CHECKING:
    from .opened_model import OpenModel


def load_engine(
    opened: OpenModel, progress: Progress, tiers: TierSettings | None, prompts: PromptCache | None, capacity: int
) -> Engine:
    """Return the engine of an opened model. See `OpenModel.load`."""
    config, checkpoint, device, dtype = opened.config, opened.checkpoint, opened.device, opened.dtype
    check_middle(opened.speculation, tiers is not None and tiers.mode == PLANES)
    use_threads(config.threads)
    do = opened.operations(opened.shape)
    stores = weights = None
    if tiers is not None:
        _check_tiers(opened, tiers)
        link = make_link(device, tiers.link_gb_s, tiers.disk is not None)
        weights = _weight_tier(opened, tiers, link)
        stores = TieredStoreFactory(do, device, tiers, link, kv=tiered_format(config.kv, opened.packs))
        if capacity and device.type == "cuda":
            stores.reserve(checkpoint.shape if opened.share is None else opened.share.shape, capacity, dtype)
    model = load_model(checkpoint, dtype, device, progress, do, weights, opened.group, opened.share)
    draft = _load_draft(opened, progress, model)
    model.kv = config.kv
    if device.type == "cuda":
        _compile(opened, model, draft, tiers, capacity)
    more = prompts, lambda: opened.dry_breakers, opened.constraints
    return Engine(model, checkpoint.shape.eos_ids, config.prefill_chunk, draft, stores, *more)


def _check_tiers(opened: OpenModel, tiers: TierSettings) -> None:
    """Raise SettingsError for models, experts and quantised copies of keys and values that tiers do not have."""
    kv = opened.config.kv
    check_model(opened.checkpoint.shape)
    opened.check_experts(tiers.experts)
    if tiers.experts != "device" and tiers.weight_layers is not None:
        raise SettingsError(
            "experts in host memory do not go with other weights there",
            "leave weight_layers out, or use experts=device",
        )
    if tiers.mode == PLANES:
        check_planes(tiered_format(kv, opened.packs))
    if KV_FORMATS[kv] is PACKED_KV and not opened.unpacks:
        raise SettingsError(
            f"--kv {kv} needs the native kernel, too, for a GPU's offloaded keys and values",
            "leave --kv out, or offloading; triforce doctor says more about the kernel",
        )


def _weight_tier(opened: OpenModel, tiers: TierSettings, link: Link) -> WeightTier | None:
    """Return where weights are that do not all stay on the device; None if they do."""
    if tiers.experts == "device":
        return None if tiers.weight_layers is None else WeightTier(tiers.weight_layers, link)
    experts = ExpertTier(tiers.expert_layers, link, opened.host_operations, tiers.expert_rows)
    return WeightTier(opened.shape.layers, link, experts)


def _load_draft(opened: OpenModel, progress: Progress, target: Model) -> Model | Head | None:
    if opened.draft is None:
        return None
    operations = opened.operations(opened.draft.shape)
    if isinstance(opened.draft, HeadCheckpoint):
        target.tap(opened.draft.head.taps)
        level = level_of(opened.weight_bits.layers) if operations.serves_quantized(opened.dtype) else None
        return opened.draft.load(target, operations, level)
    draft = load_model(opened.draft, opened.dtype, opened.device, progress, operations)
    draft.bar(opened.barred)
    return draft


def _compile(opened: OpenModel, model: Model, draft: object, tiers: TierSettings | None, capacity: int) -> None:
    """Compile Triton's kernels before the first token, where they attend."""
    chunk = opened.selected_chunk(opened.speculation, capacity or model.shape.context, tiers is not None)
    table = chunk if tiers is None and opened.plan_inputs(1).in_place(0) else None
    kv = opened.config.kv if tiers is None else tiered_format(opened.config.kv, opened.packs)
    own = Needs(kv, table or 0, tiers is not None, tiers is not None and tiers.mode == PLANES, tiers is None)
    for network, needs in ((model, own), (draft, Needs())):
        if isinstance(network, Model):  # a head has what the model has
            warm_up(network.shape.full_attention, opened.dtype, opened.device, needs)
            warm_up_model(network)
