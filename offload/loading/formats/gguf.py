"""GGUF files as checkpoints: shape, tokenizer and weights, under transformers' names."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...architecture.checkpoint_json import read_json
from ...architecture.config import ModelShape
from ...architecture.config_checks import ConfigCheck
from ...architecture.families import FAMILIES, GGUF_FAMILIES, Family, GGUFNames
from ...architecture.hf_config import shape_from_config
from ...architecture.weight_formats import FORMATS
from ...errors import CheckpointError, UnsupportedModel
from ...short_repr import short_repr, short_text
from ..tokenizers.gguf_tokenizer import end_of_turn_ids, special_ids, tokenizer_from_metadata
from .checkpoint import Checkpoint, Part, Weight, Weights
from .gguf_file import GGUFFile, TensorInfo, unsupported_type
from .layer_tensors import checkpoint_sizes, layer_sizes

if TYPE_CHECKING:
    from torch import Tensor

    from ...kernels.quantized import Quantized
    from ..tokenizers.tokenizer import Tokenizer

_KEYS = {  # behind the name of the architecture
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_OPTIONAL = ("num_key_value_heads", "head_dim")
_EXPERT_KEYS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_HINT = "fetch or convert the model again"
_SAFETENSORS = "use the model's safetensors"
_UNSUPPORTED = {  # keys that are absent or zero in models that run -> what others have
    "expert_count": "mixtures of experts of this architecture",
    "expert_shared_count": "experts that all tokens share",
    "expert_group_count": "groups of experts",
    "attention.sliding_window": "sliding windows in this architecture",
    "rope.dimension_sections": "RoPE on several axes, as in models that read images,",
    "nextn_predict_layers": "layers that predict further tokens",
    "attention.clamp_kqv": "limits of q, k and v",
    "attention.max_alibi_bias": "ALiBi's biases",
}
_MODULES = {  # llama.cpp's names of tensors -> the decoder's
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_sinks": "self_attn.sinks",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    **dict.fromkeys(("attn_kv_b", "attn_k_b", "attn_v_b"), "self_attn.kv_b_proj"),
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
}
_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # ggml's names -> torch's
_BARE = ("self_attn.sinks", "mlp.gate.e_score_correction_bias")  # whose names in safetensors do not end with .weight
_FREQUENCIES = ("attn_rot_embd", "rope_freqs")  # RoPE's, of old files
_LAYER = re.compile(r"blk\.(\d{1,9})\.(\w+)")
_STORED = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<stem>\w+)\.(?P<kind>weight|bias)")


@dataclass(frozen=True)
class GGUFWeight:
    """A tensor of a GGUF file, or one expert's part of it; `heads`: those whose rows are stored as neighbours.

    It is a `Weight`.
    """

    tensor: TensorInfo
    expert: int | None = None
    heads: int | None = None

    @property
    def size(self) -> tuple[int, ...]:
        return self.tensor.size if self.expert is None else self.tensor.size[1:]

    @property
    def bits(self) -> float | None:
        kind = FORMATS.get(self.tensor.kind)
        return None if kind is None else kind.bits_per_weight

    @property
    def is_quantized(self) -> bool:
        return self.tensor.kind not in _FLOATS

    def _stored(self) -> Tensor:
        """Return the mapped bytes `[rows, bytes]` uint8."""
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of memory that cannot be written to: nothing writes here
            data = torch.from_numpy(self.tensor.data if self.expert is None else self.tensor.data[self.expert])
        if self.heads is None:
            return data
        # Rows of q and k in transformers' order: llama.cpp's RoPE pairs neighbours, not halves.
        return data[torch.arange(self.size[0]).view(self.heads, -1, 2).transpose(1, 2).flatten()]

    def read(self, part: Part | None = None) -> Tensor:
        """Return the tensor: dequantised in fp32 as a whole, and then sliced."""
        import torch

        data, kind = self._stored(), self.tensor.kind
        if kind in _FLOATS:
            return data.view(getattr(torch, _FLOATS[kind]))[part or ...]
        from gguf import GGMLQuantizationType, dequantize

        values = dequantize(data.numpy(), GGMLQuantizationType(self.tensor.type))
        return torch.from_numpy(np.array(values))[part or ...]

    def quantized(self) -> Quantized | None:
        if self.bits is None:
            return None
        from .gguf_blocks import stored_matrix

        return stored_matrix(self.tensor.kind, self._stored())


@dataclass(frozen=True)
class HeadsWeight:
    """Keys and values of latent attention as one tensor `[heads * (plain + value_dim), rank]`. It is a `Weight`.

    A file has them apart, `[heads, rank, plain]` and `[heads, value_dim, rank]`.
    """

    keys: GGUFWeight
    values: GGUFWeight
    bits = None

    @property
    def size(self) -> tuple[int, ...]:
        heads, rank, plain = self.keys.size
        return heads * (plain + self.values.size[1]), rank

    @property
    def is_quantized(self) -> bool:
        return self.keys.is_quantized

    def read(self, part: Part | None = None) -> Tensor:
        import torch

        return torch.cat((self.keys.read().mT, self.values.read()), 1).flatten(0, 1)[part or ...]

    def quantized(self) -> None:
        return None


class GGUFCheckpoint(Checkpoint):
    """A .gguf file, with the other parts of the same model beside it.

    A folder with model.gguf and generation_config.json, as the embedded model is installed, is read in the same way.
    """

    def __init__(self, path: Path, generation: Path | None = None) -> None:
        """`generation` is a generation_config.json; its end-of-sequence tokens come in addition to the file's."""
        self.path = path
        self._file = GGUFFile(path)
        self._family, self._names = self._find_family()
        self.generation = {} if generation is None else read_json(generation)
        self.shape = self._shape()
        self._check_types()
        if name := next(self._unused(), None):
            raise UnsupportedModel(f"GGUF models with the tensor {short_text(name)} are not supported", _SAFETENSORS)

    def files(self) -> list[Path]:
        return self._file.paths

    def close(self) -> None:
        self._file.close()

    def load_tokenizer(self) -> Tokenizer:
        return tokenizer_from_metadata(self._file.value)

    def _find_family(self) -> tuple[Family, GGUFNames]:
        """Return the family of the file's architecture, and its names in files. Raises UnsupportedModel."""
        architecture = self._file.value("general.architecture")
        if architecture not in GGUF_FAMILIES:
            raise UnsupportedModel(
                f"the GGUF architecture {short_text(str(architecture))} is not supported",
                f"what runs: {', '.join(GGUF_FAMILIES)}",
            )
        family = GGUF_FAMILIES[architecture]
        if family.gguf is not None and family.gguf.sparse and self._file.value(f"{architecture}.expert_count"):
            family = FAMILIES[family.gguf.sparse]
        assert family.gguf is not None
        return family, family.gguf

    def _own(self, key: str, default: Any = None) -> Any:
        """Return the value of a key behind the architecture's name."""
        value = self._file.value(f"{self._names.architecture}.{key}")
        value = value.tolist() if isinstance(value, np.ndarray) else value
        if isinstance(value, list) and len(set(value)) == 1 and type(value[0]) is not bool:
            value = value[0]  # of each layer the same
        return default if value is None else value

    def _shape(self) -> ModelShape:
        """Read the shape from the metadata. Raises CheckpointError, UnsupportedModel."""
        names, sizes = self._names, {name: tensor.size for name, tensor in self._file.tensors.items()}
        keys = _KEYS | (_EXPERT_KEYS if "num_experts" in self._family.defaults else {}) | dict(names.keys)
        if self._family.has_layer_windows:
            keys["sliding_window"] = "attention.sliding_window"
        values = {ours: value for ours, key in keys.items() if (value := self._own(key)) is not None}
        if missing := [keys[name] for name in _KEYS if name not in values and name not in _OPTIONAL]:
            raise CheckpointError(f"{self.path} lacks {missing[0]}", _HINT)
        self._refuse_variants(values, keys)
        values["num_hidden_layers"] -= values.pop("num_nextn_predict_layers", 0)  # the file counts them, too
        if "use_qk_norm" in self._family.defaults:
            values["use_qk_norm"] = "blk.0.attn_q_norm.weight" in sizes
        if values.get("sliding_window") == 0:  # "not set", as in llama.cpp
            values["sliding_window"] = None
        check = ConfigCheck(str(self.path), _HINT)
        special = special_ids(self._file.value)
        ids = {f"{name}_token_id": special.get(f"{name}_token") for name in ("eos", "bos")}
        self.config = {**names.left_out, **values, **ids}
        self.config |= {
            "model_type": self._family.name,
            "vocab_size": sizes["token_embd.weight"][0] if "token_embd.weight" in sizes else None,
            "rope_parameters": self._rope(),
            "attention_bias": "blk.0.attn_q.bias" in sizes,
            "tie_word_embeddings": "output.weight" not in sizes,
        }
        named = [self._file.value(f"tokenizer.ggml.{key}_token_id") for key in ("eot", "eom")]
        ends = [*check.token_ids([token for token in named if token is not None])]
        ends += [*end_of_turn_ids(self._file.value), *check.token_ids(self.generation.get("eos_token_id"))]
        generation = self.generation | {"eos_token_id": ends}
        shape = shape_from_config(self.config, generation, check=check)
        rotated = self._own("rope.dimension_count", shape.rotary_dim)
        if rotated != shape.rotary_dim:
            if not self._family.has_partial_rope:
                raise UnsupportedModel("RoPE on a part of each head is not supported", _SAFETENSORS)
            self.config["rope_parameters"]["partial_rotary_factor"] = rotated / shape.head_dim
            shape = shape_from_config(self.config, generation, check=check)
        if names.adds_norm_offset:
            shape = replace(shape, norm_offset=0.0)
        return replace(shape, rope_divisors=self._divisors(shape.rotary_dim // 2))

    def _refuse_variants(self, values: dict[str, Any], keys: dict[str, str]) -> None:
        """Raise UnsupportedModel for variants that the decoder would compute as the plain model, and wrongly.

        `keys` are those that are read.
        """
        names = self._names
        if any(isinstance(values.get(name), list) for name in _KEYS):
            raise UnsupportedModel("GGUF models whose layers differ in their sizes are not supported", _SAFETENSORS)
        if self._own("attention.causal") is False:
            raise UnsupportedModel("attention in both directions is not supported", _SAFETENSORS)
        for key, what in _UNSUPPORTED.items():
            value = self._own(key)
            if key not in keys.values() and (any(value) if isinstance(value, list) else value):
                raise UnsupportedModel(f"{what} are not supported ({key} is {short_repr(value)})", _SAFETENSORS)
        for key in names.switches:
            if self._own(key) is False:
                raise UnsupportedModel(f"{self._family.name} with {key} false is not supported", _SAFETENSORS)
        if "rope_factors_long.weight" in self._file.tensors:
            raise UnsupportedModel("GGUF models with longrope are not supported", _SAFETENSORS)

    def _rope(self) -> dict[str, Any]:
        """Return the RoPE parameters under transformers' names. Raises UnsupportedModel."""
        rope = {"rope_type": "default", "rope_theta": self._own("rope.freq_base", 10000.0)}
        factor = self._own("rope.scaling.factor") or self._own("rope.scale_linear") or 0.0  # the old name comes second
        kind = self._own("rope.scaling.type", "linear")  # the format's default
        if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
            return rope
        if kind not in ("linear", "yarn"):
            raise UnsupportedModel(f"the GGUF RoPE scaling {short_repr(kind)} is not supported", _SAFETENSORS)
        for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
            if self._own(f"rope.scaling.{key}", 1.0) not in (1.0, -1.0):  # -1: not set
                raise UnsupportedModel(f"GGUF models with rope.scaling.{key} are not supported", _SAFETENSORS)
        rope |= {"rope_type": kind, "factor": factor or 1.0}
        original = self._own("rope.scaling.original_context_length")
        if kind == "yarn" and original:  # 0 is "not set", as in llama.cpp
            rope["original_max_position_embeddings"] = original
        if multiplier := self._own("rope.scaling.yarn_log_multiplier"):
            rope |= dict.fromkeys(("mscale", "mscale_all_dim"), 10 * multiplier)
        betas = {name: self._own(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        rope |= {name: value for name, value in betas.items() if value is not None}
        return rope | dict(self._names.yarn) if kind == "yarn" else rope

    def _check_types(self) -> None:
        """Raise UnsupportedModel for a weight of a type that neither we nor the gguf package dequantise."""
        kinds = {tensor.kind: name for name, tensor in self._file.tensors.items() if self._transformers_name(name)}
        for kind in kinds.keys() - _FLOATS.keys() - FORMATS.keys():
            from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

            number = GGMLQuantizationType[kind]
            try:
                dequantize(np.zeros((1, GGML_QUANT_SIZES[number][1]), np.uint8), number)
            except NotImplementedError:
                raise unsupported_type(kinds[kind], kind) from None

    def _divisors(self, wanted: int) -> tuple[float, ...] | None:
        """Read the divisor of each frequency, as llama.cpp stores Llama 3's RoPE scaling. Raises CheckpointError."""
        tensor = self._file.tensors.get("rope_freqs.weight")
        if tensor is None:
            return None
        divisors = GGUFWeight(tensor).read()
        if divisors.shape != (wanted,) or not (divisors.isfinite() & (divisors > 0)).all():
            raise CheckpointError(f"{self.path}: rope_freqs.weight is not {wanted} positive numbers", _HINT)
        return tuple(divisors.tolist())

    @cached_property
    def stored_weights(self) -> Weights:
        names, found = self._names, dict[str, Weight]()
        heads = {"attn_q": self.shape.heads, "attn_k": self.shape.kv_heads} if names.permutes else {}
        for name, tensor in self._file.tensors.items():
            ours = self._transformers_name(name)
            if ours is None:
                continue
            if name.endswith("attn_v_b.weight"):
                if keys := self._file.tensors.get(name.replace("attn_v_b", "attn_k_b")):
                    found[ours] = HeadsWeight(GGUFWeight(keys), GGUFWeight(tensor))
            elif name.endswith("attn_k_b.weight"):
                continue  # with attn_v_b
            elif "*" in ours:
                for expert in range(tensor.size[0]):
                    found[ours.replace("*", str(expert))] = GGUFWeight(tensor, expert)
            else:
                found[ours] = GGUFWeight(tensor, heads=heads.get(name.split(".")[-2]))
        return found

    def _transformers_name(self, name: str) -> str | None:
        """Map blk.3.attn_q.weight to model.layers.3.self_attn.q_proj.weight; None for a tensor that is not a weight.

        The name of a tensor with the matrices of all experts has * in place of their numbers.
        """
        match = _STORED.fullmatch(name)
        has_post_norms = any(spec.post_norms for spec in self.shape.specs)
        norm = "post_self_attn_layernorm" if has_post_norms else "post_attention_layernorm"
        modules = _MODULES | {"post_attention_norm": norm}
        if match is None or match["stem"] not in modules:
            return None
        if int(match["layer"] or 0) in range(self.shape.layers, self._own("block_count")):
            return None  # a layer that predicts further tokens
        layer = "" if match["layer"] is None else f"model.layers.{match['layer']}."
        module = self._family.checkpoint_name(modules[match["stem"]])
        return f"{layer}{module}" if module in _BARE else f"{layer}{module}.{match['kind']}"

    def _unused(self) -> Iterator[str]:
        """Yield the names of tensors of the model's layers that the decoder does not use."""
        shape = self.shape
        layers = {spec: checkpoint_sizes(shape, layer_sizes(shape, spec)) for spec in dict.fromkeys(shape.specs)}
        for name in self._file.tensors:
            match = _LAYER.match(name)
            if match is None or match[2] in _FREQUENCIES or int(match[1]) >= shape.layers:
                continue
            ours = self._transformers_name(name)
            ours = ours and ours.removeprefix(f"model.layers.{match[1]}.").replace("*", "0")
            if ours not in layers[shape.spec(int(match[1]))]:
                yield name
