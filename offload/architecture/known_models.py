"""The well-known models, which are the rows of known_models.tsv: their dimensions, vocabularies and sources.

Imports nothing heavy.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from .dims import Dimensions, LinearAttention, WeightBits
from .layer_spec import Experts, LayerSpec


@dataclass(frozen=True, slots=True)
class PlanShape(Dimensions):
    """Dimensions of a decoder. `context` is the longest sequence that it was trained for, in tokens."""

    context: int


def _shape(sizes: str, differing: str) -> PlanShape:
    """Return the dimensions of a row: its six numbers, and what differs from the usual."""
    layers, hidden, heads, kv_heads, intermediate, vocab = map(int, sizes.split())
    pairs = (field.partition("=") for field in differing.split())
    given = {name: [int(number) for number in re.findall(r"\d+", value)] for name, _, value in pairs}
    (head_dim,), (context,) = given.get("head_dim", [128]), given.get("context", [131072])
    more: dict[str, Any] = {"tied_embeddings": "tied" in given}
    if "experts" in given:
        count, per_token, width, *shared = given["experts"]
        more["experts"] = Experts(count, per_token, width, layers, *shared)
    spec = LayerSpec(router="all" if "experts" in given else "", gates_heads="linear" in given)
    more["specs"] = (spec,)
    if "window" in given:
        window, every = given["window"]
        more["specs"] = (replace(spec, window=window),) * (every - 1) + (spec,)
    if "linear" in given:
        value_heads, every = given["linear"]
        linear = LinearAttention(16, value_heads, 128, 128, 4, layers=layers - layers // every)
        more |= {"linear": linear, "specs": (replace(spec, is_linear=True),) * (every - 1) + (spec,)}
    more |= {"head_dim": head_dim, "context": context, "intermediate": intermediate, "vocab": vocab}
    return PlanShape(layers, hidden, heads, kv_heads, **more)


class KnownModel(NamedTuple):
    """A row of known_models.tsv. `hub_id` is "" for a model that comes embedded; `licence` has how it is had, too."""

    shape: PlanShape
    vocabulary: str
    hub_id: str
    licence: str


def _rows() -> dict[str, KnownModel]:
    licences, models = {"": ""}, {}
    for line in Path(__file__).with_suffix(".tsv").read_text("utf-8").splitlines():
        fields = line.split("\t")
        if line.startswith("#") or len(fields) < 2:
            continue
        if len(fields) == 2:
            licences[fields[0]] = fields[1]
        else:
            name, vocabulary, sizes, differing, hub_id, licence = (fields + [""] * 3)[:6]
            models[name] = KnownModel(_shape(sizes, differing), vocabulary, hub_id, licences[licence])
    return models


MODELS = _rows()
KNOWN = {name: model.shape for name, model in MODELS.items()}
# Known models with the same tokens, but for a few special ones: those of a vocabulary may draft for each other.
VOCABULARIES = {
    vocabulary: tuple(name for name, model in MODELS.items() if model.vocabulary == vocabulary)
    for vocabulary in dict.fromkeys(model.vocabulary for model in MODELS.values())
}
# Qwen3 adds four special tokens to Qwen2.5's vocabulary; SmolLM3 names Llama 3's anew, and DeepSeek's distilled models
# those of both.
_COMPATIBLE = {"Qwen2.5": "Qwen", "Qwen3": "Qwen", "Llama 3": "Llama 3", "SmolLM3": "Llama 3"}
_COMPATIBLE |= {"DeepSeek-R1 (Qwen)": "Qwen", "DeepSeek-R1 (Llama)": "Llama 3"}
# Versions of a name that has others: their dimensions differ (v0.1 has a window, v0.2 a smaller vocabulary).
VERSIONS = {"Mistral-7B": "v03"}
_CURRENT = {"Qwen3", "Phi-4", "Phi-4-mini", "Gemma 3", "gpt-oss", "Mistral (Tekken)", "GLM-4", "SmolLM3", "Granite 3.3"}
_LARGEST_DRAFT = 0.25  # of the weights that the target reads for a token: beyond that, drafting hardly pays


_MXFP4_BITS = 4.5  # in memory: codes of 4 bits, and a scale of 16 bits for each 32


def published_bits(known: str | None) -> WeightBits | None:
    """Return the bits that a known model's weights take in memory beside bf16: of gpt-oss, whose experts are in MXFP4.

    None for models that are published in 16 bits, and for no known model.
    """
    if known is None or known not in VOCABULARIES["gpt-oss"]:
        return None
    return WeightBits(16, 16, experts=_MXFP4_BITS)


def weight_bytes(known: str) -> int:
    """Return the bytes of a known model's weights as they are published, which a download has."""
    shape, bits = KNOWN[known], published_bits(known) or WeightBits(16, 16)
    return shape.layers * shape.layer_bytes(bits) + shape.outer_bytes(bits)


def is_current(known: str) -> bool:
    """Return whether a known model is of its publisher's latest series."""
    return MODELS[known].vocabulary in _CURRENT


def compatible(target: str, draft: str) -> bool:
    """Return whether one known model has the tokens that another needs of a draft model."""
    first, second = (MODELS[name].vocabulary for name in (target, draft))
    return _COMPATIBLE.get(first, first) == _COMPATIBLE.get(second, second)


def draft_for(known: str) -> str | None:
    """Return the smallest known model with a known model's vocabulary, if it is small enough to draft; else None."""
    smallest = min(VOCABULARIES[MODELS[known].vocabulary], key=lambda name: KNOWN[name].read_parameters)
    is_small = KNOWN[smallest].read_parameters <= _LARGEST_DRAFT * KNOWN[known].read_parameters
    return smallest if is_small else None


# What publishers write behind a name without changing the dimensions.
_SUFFIX = re.compile(r"(instruct|chat|base|hf|it|v\d+|\d{4}|gguf|[qf]\d\w*|bf16|12b)+$")


def known_name(name: str) -> str | None:
    """Return the well-known model that has the dimensions of `name`; None if none has.

    Publisher and variant do not matter: "meta-llama/Llama-3.1-8B-Instruct" has those of "Llama-3.1-8B".
    """
    wanted = simplified(name)
    names = {simplified(name): name for name in KNOWN}
    candidates = (wanted, re.sub("instruct|thinking|it$", "", wanted), _SUFFIX.sub("", wanted))
    known = next((names[candidate] for candidate in candidates if candidate in names), None)
    version = re.search(r"v\d+", wanted)
    return None if known and version and VERSIONS.get(known, version[0]) != version[0] else known


def sibling_of(name: str, shape: Dimensions) -> str | None:
    """Return a well-known model that drafts for a model of some name and dimensions; None if none is known."""
    known = known_name(name) or next((known for known, other in KNOWN.items() if _size(other) == _size(shape)), None)
    return None if known is None else draft_for(known)


def _size(shape: Dimensions) -> tuple[int, ...]:
    heads = shape.heads, shape.kv_heads, shape.head_dim
    return shape.layers, shape.hidden, *heads, shape.intermediate, shape.vocab


def simplified(name: str) -> str:
    """Return a model's name in lower case, without publisher, punctuation and file name ending."""
    bare = re.sub(r"^.*/|\.gguf$", "", name.lower())
    bare = re.sub(r"[^a-z0-9]", "", bare)
    return re.sub(r"^(nousresearch|yarn|meta|deepseek)+", "", bare)
