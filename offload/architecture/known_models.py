"""The dimensions of well-known models, and which of them share a vocabulary. Imports nothing heavy.

Dimensions are those of each model's published config.json, and `context` is its `max_position_embeddings`. To add a
model, add its line here and its source to loading/hub/registry.py.
"""

import re
from dataclasses import dataclass
from typing import Any

from .dims import WINDOW_SLACK, Dimensions, LinearAttention
from .layer_spec import Experts
from .parameters import WeightBits


@dataclass(frozen=True, slots=True)
class PlanShape(Dimensions):
    """Dimensions of a decoder. `context` is the longest sequence that it was trained for, in tokens."""

    context: int
    dual_chunk: bool = False  # whether a longer context needs dual chunk attention, which is not supported


def _known(
    layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, vocab: int, **rest: Any
) -> PlanShape:
    """Return a shape, with defaults that most of the known models share."""
    rest = {"head_dim": 128, "tied_embeddings": False, "context": 131072} | rest
    return PlanShape(layers, hidden, heads, kv_heads, intermediate=intermediate, vocab=vocab, **rest)


_LLAMA_2_7B = (32, 4096, 32, 32, 11008, 32000)
_LLAMA_2_13B = (40, 5120, 40, 40, 13824, 32000)
_LLAMA_33B = (6656, 52, 52, 17920, 32000)  # without its layers
_LLAMA_3_70B = (80, 8192, 64, 8, 28672, 128256)
_MISTRAL_SMALL = (40, 5120, 32, 8, 32768, 131072)
_QWEN2_7B, _QWEN2_14B = (28, 3584, 28, 4, 18944, 152064), (48, 5120, 40, 8, 13824, 152064)
_TIED = {"tied_embeddings": True}
_QWEN2 = {"context": 32768}  # of Instruct; four times that with YaRN, as the cards of 7B and above say
_QWEN3 = {"context": 40960}  # four times 32,768 with YaRN, as the cards of 4B and above say
_1M = {"context": 262144, "dual_chunk": True}  # up to 1,010,000 tokens with dual chunk attention


def _gemma3(
    layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, vocab: int, **rest: Any
) -> PlanShape:
    """Return the shape of a Gemma 3, the text part: of six layers, the last one has no window."""
    window = rest.pop("window", 1024)
    rest = {
        "head_dim": 256,
        **_TIED,
        "sliding_layers": layers - layers // 6,
        "window_room": window + WINDOW_SLACK,
    } | rest
    return _known(layers, hidden, heads, kv_heads, intermediate, vocab, **rest)


def _gpt_oss(layers: int, experts: int) -> PlanShape:
    """Return the shape of a gpt-oss: every other layer has a window."""
    windows = {"sliding_layers": layers // 2, "window_room": 128 + WINDOW_SLACK}
    mixture = Experts(experts, 4, 2880, layers=layers)
    return _known(layers, 2880, 64, 8, 2880, 201088, head_dim=64, experts=mixture, **windows)


def _hybrid(
    layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, vocab: int, **rest: Any
) -> PlanShape:
    """Return the shape of a Qwen3-Next or Qwen3.5: of four layers, the last one has no linear attention."""
    values = rest.pop("value_heads", 32)
    linear = LinearAttention(16, values, 128, 128, 4, layers=layers - layers // 4)
    rest = {"head_dim": 256, "context": 262144, "linear": linear, "gates_heads": True} | rest
    return _known(layers, hidden, heads, kv_heads, intermediate, vocab, **rest)


KNOWN = {
    "Llama-2-7B": _known(*_LLAMA_2_7B, context=4096),
    "Llama-2-7B-128K": _known(*_LLAMA_2_7B),
    "Llama-2-13B": _known(*_LLAMA_2_13B, context=4096),
    "Llama-2-13B-128K": _known(*_LLAMA_2_13B),
    "Llama-2-22B": _known(40, *_LLAMA_33B, context=4096),  # made of 13B and a 33B
    "Llama-2-70B": _known(80, 8192, 64, 8, 28672, 32000, context=4096),
    "LWM-Text-Chat-128K": _known(*_LLAMA_2_7B),
    "LWM-Text-Chat-1M": _known(*_LLAMA_2_7B, context=1048576),
    "Vicuna-33B": _known(60, *_LLAMA_33B, context=2048),
    "TinyLlama-1.1B": _known(22, 2048, 32, 4, 5632, 32000, head_dim=64, context=2048),
    "Sheared-LLaMA-1.3B": _known(24, 2048, 16, 16, 5504, 32000, context=4096),
    "InternLM-7B": _known(32, 4096, 32, 32, 11008, 103168, context=2048),
    "InternLM-20B": _known(60, 5120, 40, 40, 13824, 103168, context=4096),
    "Llama-3.1-8B": _known(32, 4096, 32, 8, 14336, 128256),
    "Llama-3.1-70B": _known(*_LLAMA_3_70B),
    "Llama-3.2-1B": _known(16, 2048, 32, 8, 8192, 128256, head_dim=64, **_TIED),
    "Llama-3.2-3B": _known(28, 3072, 24, 8, 8192, 128256, **_TIED),
    "Llama-3.3-70B": _known(*_LLAMA_3_70B),
    "Qwen2.5-0.5B": _known(24, 896, 14, 2, 4864, 151936, head_dim=64, **_TIED, **_QWEN2),
    "Qwen2.5-1.5B": _known(28, 1536, 12, 2, 8960, 151936, **_TIED, **_QWEN2),
    "Qwen2.5-3B": _known(36, 2048, 16, 2, 11008, 151936, **_TIED, **_QWEN2),
    "Qwen2.5-7B": _known(*_QWEN2_7B, **_QWEN2),
    "Qwen2.5-14B": _known(*_QWEN2_14B, **_QWEN2),
    "Qwen2.5-32B": _known(64, 5120, 40, 8, 27648, 152064, **_QWEN2),
    "Qwen2.5-72B": _known(80, 8192, 64, 8, 29568, 152064, **_QWEN2),
    "Qwen2.5-7B-1M": _known(*_QWEN2_7B, **_1M),
    "Qwen2.5-14B-1M": _known(*_QWEN2_14B, **_1M),
    "DeepSeek-R1-Distill-Qwen-1.5B": _known(28, 1536, 12, 2, 8960, 151936),
    "DeepSeek-R1-Distill-Qwen-7B": _known(*_QWEN2_7B),
    "DeepSeek-R1-Distill-Qwen-14B": _known(*_QWEN2_14B),
    "DeepSeek-R1-Distill-Qwen-32B": _known(64, 5120, 40, 8, 27648, 152064),
    "DeepSeek-R1-Distill-Llama-8B": _known(32, 4096, 32, 8, 14336, 128256),
    "DeepSeek-R1-Distill-Llama-70B": _known(*_LLAMA_3_70B),
    "Qwen3-0.6B": _known(28, 1024, 16, 8, 3072, 151936, **_TIED, **_QWEN3),
    "Qwen3-1.7B": _known(28, 2048, 16, 8, 6144, 151936, **_TIED, **_QWEN3),
    "Qwen3-4B": _known(36, 2560, 32, 8, 9728, 151936, **_TIED, **_QWEN3),
    "Qwen3-4B-2507": _known(36, 2560, 32, 8, 9728, 151936, **_TIED, context=262144),
    "Qwen3-8B": _known(36, 4096, 32, 8, 12288, 151936, **_QWEN3),
    "Qwen3-14B": _known(40, 5120, 40, 8, 17408, 151936, **_QWEN3),
    "Qwen3-32B": _known(64, 5120, 64, 8, 25600, 151936, **_QWEN3),
    "Qwen3-30B-A3B": _known(48, 2048, 32, 4, 6144, 151936, experts=Experts(128, 8, 768, layers=48), **_QWEN3),
    "Qwen3-235B-A22B": _known(94, 4096, 64, 4, 12288, 151936, experts=Experts(128, 8, 1536, layers=94), **_QWEN3),
    "Qwen3-Next-80B-A3B": _hybrid(
        *(48, 2048, 16, 2, 5120, 151936), experts=Experts(512, 10, 512, layers=48, shared=512)
    ),
    "Mixtral-8x7B": _known(32, 4096, 32, 8, 14336, 32000, experts=Experts(8, 2, 14336, layers=32), context=32768),
    "Phi-4": _known(40, 5120, 40, 10, 17920, 100352, context=16384),
    "Phi-4-mini": _known(32, 3072, 24, 8, 8192, 200064, **_TIED),
    "Gemma-3-270M": _gemma3(18, 640, 4, 1, 2048, 262144, window=512, context=32768),
    "Gemma-3-1B": _gemma3(26, 1152, 4, 1, 6912, 262144, window=512, context=32768),
    "Gemma-3-4B": _gemma3(34, 2560, 8, 4, 10240, 262208),
    "Gemma-3-12B": _gemma3(48, 3840, 16, 8, 15360, 262208),
    "Gemma-3-27B": _gemma3(62, 5376, 32, 16, 21504, 262208, head_dim=128),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "Mistral-7B": _known(32, 4096, 32, 8, 14336, 32768, context=32768),
    "Mistral-Nemo": _known(40, 5120, 32, 8, 14336, 131072),  # heads are narrower than hidden / heads
    "Mistral-Small-24B": _known(*_MISTRAL_SMALL, context=32768),
    "Mistral-Small-3.1-24B": _known(*_MISTRAL_SMALL),  # its text part
    "GLM-4-9B-0414": _known(40, 4096, 32, 2, 13696, 151552, context=32768),
    "GLM-4-32B-0414": _known(61, 6144, 48, 2, 23040, 151552, context=32768),
    "SmolLM3-3B": _known(36, 2048, 16, 4, 11008, 128256, **_TIED, context=65536),
    "Granite-3.3-2B": _known(40, 2048, 32, 8, 8192, 49159, head_dim=64, **_TIED),
    "Granite-3.3-8B": _known(40, 4096, 32, 8, 12800, 49159, **_TIED),
    "Yi-6B-200K": _known(32, 4096, 32, 4, 11008, 64000, context=200000),
    "Yi-34B-200K": _known(60, 7168, 56, 8, 20480, 64000, context=200000),
    "SmolLM2-135M": _known(30, 576, 9, 3, 1536, 49152, head_dim=64, **_TIED, context=8192),
    "Llama-68M": _known(2, 768, 12, 12, 3072, 32000, head_dim=64, context=2048),  # JackFram's draft model
}
# Known models with the same tokens, but for a few special ones: those of a line may draft for each other.
VOCABULARIES = {
    "Llama 2": (
        *("Llama-68M", "TinyLlama-1.1B", "Sheared-LLaMA-1.3B", "Llama-2-7B", "Llama-2-7B-128K", "Llama-2-13B"),
        *("Llama-2-13B-128K", "Llama-2-22B", "Vicuna-33B", "Llama-2-70B", "LWM-Text-Chat-128K", "LWM-Text-Chat-1M"),
    ),
    "InternLM": ("InternLM-7B", "InternLM-20B"),
    "Llama 3": ("Llama-3.2-1B", "Llama-3.2-3B", "Llama-3.1-8B", "Llama-3.1-70B", "Llama-3.3-70B"),
    "Qwen2.5": tuple(name for name in KNOWN if name.startswith("Qwen2.5-")),
    "Qwen3": tuple(name for name in KNOWN if name.startswith("Qwen3-")),
    "DeepSeek-R1 (Qwen)": tuple(name for name in KNOWN if name.startswith("DeepSeek-R1-Distill-Qwen-")),
    "DeepSeek-R1 (Llama)": tuple(name for name in KNOWN if name.startswith("DeepSeek-R1-Distill-Llama-")),
    "Mixtral": ("Mixtral-8x7B",),
    "Mistral": ("Mistral-7B",),
    "Phi-4": ("Phi-4",),
    "Phi-4-mini": ("Phi-4-mini",),
    "Gemma 3": tuple(name for name in KNOWN if name.startswith("Gemma-3-")),
    "gpt-oss": ("gpt-oss-20b", "gpt-oss-120b"),
    "Mistral (Tekken)": ("Mistral-Nemo", "Mistral-Small-24B", "Mistral-Small-3.1-24B"),
    "GLM-4": ("GLM-4-9B-0414", "GLM-4-32B-0414"),
    "SmolLM3": ("SmolLM3-3B",),
    "Granite 3.3": ("Granite-3.3-2B", "Granite-3.3-8B"),
    "Yi": ("Yi-6B-200K", "Yi-34B-200K"),
    "SmolLM2": ("SmolLM2-135M",),
}
# Qwen3 adds four special tokens to Qwen2.5's vocabulary; SmolLM3 names Llama 3's anew, and DeepSeek's distilled models
# those of both.
_COMPATIBLE = {"Qwen2.5": "Qwen", "Qwen3": "Qwen", "Llama 3": "Llama 3", "SmolLM3": "Llama 3"}
_COMPATIBLE |= {"DeepSeek-R1 (Qwen)": "Qwen", "DeepSeek-R1 (Llama)": "Llama 3"}
# Versions of a name that has others: their dimensions differ (v0.1 has a window, v0.2 a smaller vocabulary).
VERSIONS = {"Mistral-7B": "v03"}
_LARGEST_DRAFT = 0.25  # of the weights that the target reads for a token: beyond that, drafting hardly pays


_MXFP4_BITS = 4.5  # in memory: codes of 4 bits, and a scale of 16 bits for each 32


def published_bits(known: str | None) -> WeightBits | None:
    """Return the bits that a known model's weights take in memory beside bf16: of gpt-oss, whose experts are in MXFP4.

    None for models that are published in 16 bits, and for no known model.
    """
    if known is None or known not in VOCABULARIES["gpt-oss"]:
        return None
    return WeightBits(16, 16, experts=_MXFP4_BITS)


def compatible(target: str, draft: str) -> bool:
    """Return whether one known model has the tokens that another needs of a draft model."""
    first, second = (_vocabulary(name) for name in (target, draft))
    return _COMPATIBLE.get(first, first) == _COMPATIBLE.get(second, second)


def draft_for(known: str) -> str | None:
    """Return the smallest known model with a known model's vocabulary, if it is small enough to draft; else None."""
    smallest = min(VOCABULARIES[_vocabulary(known)], key=lambda name: KNOWN[name].read_parameters)
    is_small = KNOWN[smallest].read_parameters <= _LARGEST_DRAFT * KNOWN[known].read_parameters
    return smallest if is_small else None


def draft_models() -> dict[str, str]:
    """Return the known draft models by the name of the vocabulary that they are for."""
    found = {name: {draft_for(known) for known in models} - {None} for name, models in VOCABULARIES.items()}
    return {name: drafts.pop() for name, drafts in found.items() if drafts}


def _vocabulary(known: str) -> str:
    return next(name for name, models in VOCABULARIES.items() if known in models)


# What publishers write behind a name without changing the dimensions.
_SUFFIX = re.compile(r"(instruct|chat|base|hf|it|v\d+|\d{4}|gguf|[qf]\d\w*|bf16|12b)+$")


def known_name(name: str) -> str | None:
    """Return the well-known model that has the dimensions of `name`; None if none has.

    Publisher and variant do not matter: "meta-llama/Llama-3.1-8B-Instruct" has those of "Llama-3.1-8B".
    """
    wanted = simplified(name)
    names = {simplified(known): known for known in KNOWN}
    candidates = (wanted, re.sub("instruct|thinking|it$", "", wanted), _SUFFIX.sub("", wanted))
    found = next((names[candidate] for candidate in candidates if candidate in names), None)
    version = re.search(r"v\d+", wanted)
    return None if version and VERSIONS.get(found, version[0]) != version[0] else found


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
