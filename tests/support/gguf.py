"""GGUF files of tiny models, written as llama.cpp's converter does."""

import json

import numpy as np
from gguf import (
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    ExpertGatingFuncType,
    GGMLQuantizationType,
    GGUFWriter,
    RopeScalingType,
    TokenType,
    get_tensor_name_map,
    quants,
)

_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _permuted(weight, heads):
    """Permute the rows of q or k as llama.cpp's converter does."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def _add_tokenizer(writer, tokenizer):
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(model["vocab"], key=model["vocab"].get))
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(model["vocab"]) - 3))
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_chat_template(tokenizer.chat_template)


def write_gguf(path, model, kind=GGMLQuantizationType.F32, architecture="llama", extra=(), tokenizer=None, rope=None):
    """Write a transformers Llama to a GGUF file: `extra` tensors, a byte-level `tokenizer`, `rope` scaling by YaRN."""
    config, state = model.config, {k: v.float().numpy() for k, v in model.state_dict().items()}
    writer = GGUFWriter(path, architecture)
    _add_sizes(writer, config)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_eos_token_id(2)
    if tokenizer is not None:
        _add_tokenizer(writer, tokenizer)
    if rope is not None:
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    for i in range(config.num_hidden_layers):
        names |= {f"blk.{i}.{theirs}": f"model.layers.{i}.{ours}" for theirs, ours in _GGUF_LAYER.items()}
    for theirs, ours in names.items():
        data = state[f"{ours}.weight"]
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(theirs.split(".")[-1])
        data = data if heads is None else _permuted(data, heads)
        as_is = data.ndim == 1
        stored = np.ascontiguousarray(data) if as_is else quants.quantize(data, kind)
        writer.add_tensor(f"{theirs}.weight", stored, raw_dtype=GGMLQuantizationType.F32 if as_is else kind)
    for name, data in extra:
        writer.add_tensor(name, data)
    _write(writer)


def _add_sizes(writer, config):
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(1 if hasattr(config, "kv_lora_rank") else config.num_key_value_heads)


def _write(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_ARCHITECTURES = {  # where GGUF's name of a family is not transformers'
    "cohere": "command-r",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
    "deepseek_v3": "deepseek2",
    "glm4_moe": "glm4moe",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
}
_PERMUTED = ("llama", "granite", "granitemoe", "smollm3", "mixtral")


def write_family(path, model, kind=GGMLQuantizationType.F32, change=lambda writer: None):
    """Write a transformers model of any family, with the names of tensors that the gguf package has for it.

    `change` may add keys and tensors.
    """
    config, family = model.config, model.config.model_type
    architecture = _ARCHITECTURES.get(family, family)
    number = next(number for number in MODEL_ARCH if MODEL_ARCH_NAMES[number] == architecture)
    names = get_tensor_name_map(number, config.num_hidden_layers)
    writer = GGUFWriter(path, architecture)
    _add_dimensions(writer, config, architecture)
    change(writer)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in _parameters(model):
        if "kv_b_proj" in name:
            _add_latent_heads(writer, names, name, weight, config, kind)
            continue
        data, (*_, module, _) = weight.detach().float().numpy(), name.split(".")
        if family in _PERMUTED and module in heads:
            data = _permuted(data, heads[module])
        as_is = data.ndim == 1 or name.endswith(".bias")
        data = data + 1 if as_is and architecture.startswith("gemma") else data
        stored = np.ascontiguousarray(data) if as_is else quants.quantize(data, kind)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), stored, raw_dtype=None if as_is else kind)
    _write(writer)


def _add_latent_heads(writer, names, name, weight, config, kind):
    both = weight.detach().unflatten(0, (config.num_attention_heads, -1))
    keys, values = both.split((config.qk_nope_head_dim, config.v_head_dim), dim=1)
    for part, data in (("k_b_proj", keys.mT.contiguous()), ("v_b_proj", values.contiguous())):
        own = names.get_name(name.replace("kv_b_proj", part), (".weight",))
        writer.add_tensor(own, quants.quantize(data.numpy(), kind), raw_dtype=kind)


def _parameters(model):
    """Yield names and parameters, but no tied head; gate and up of experts, which transformers fuses, by themselves."""
    if model.config.model_type == "gpt_oss":
        yield from _gpt_oss_parameters(model)
        return
    biases = [(name, each) for name, each in model.named_buffers() if name.endswith("e_score_correction_bias")]
    yield from ((name.replace("correction_bias", "correction.bias"), each) for name, each in biases)
    for name, weight in model.named_parameters():
        name = name.replace("block_sparse_moe.experts", "mlp.experts").replace("router.weight", "router.layer.weight")
        module = name.removesuffix(".gate_up_proj")
        if name.endswith("experts.gate_up_proj"):
            gate, up = weight.chunk(2, dim=1)
            yield from ((f"{module}.gate_proj.weight", gate), (f"{module}.up_proj.weight", up))
        else:
            yield (f"{name}.weight" if ".experts." in name else name), weight


def _gpt_oss_parameters(model):
    """Yield names and parameters as `_parameters`; gate and up alternate, and weights of experts are transposed."""
    for name, weight in model.named_parameters():
        kind = "bias" if name.endswith("_bias") else "weight"
        name = name.removesuffix("_bias")
        data = weight.mT.contiguous() if "experts." in name and kind == "weight" else weight
        if name.endswith("gate_up_proj"):
            module = name.removesuffix(".gate_up_proj")
            for start, each in enumerate(("gate", "up")):
                yield f"{module}.{each}_proj.{kind}", data[:, start::2].contiguous()
        else:
            yield (f"{name}.{kind}" if name.endswith(("down_proj", "sinks")) else name), data


def _add_dimensions(writer, config, architecture):
    _add_sizes(writer, config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if rank := getattr(config, "kv_lora_rank", None):
        head_dim = rank + config.qk_rope_head_dim
        writer.add_kv_lora_rank(rank)
        writer.add_q_lora_rank(config.q_lora_rank)
        writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
        writer.add_value_length_mla(config.v_head_dim)
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
        writer.add_expert_group_used_count(config.topk_group)
        writer.add_expert_group_count(config.n_group)
    writer.add_key_length(head_dim)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    if getattr(config, "layer_types", None) and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
        if architecture == "gemma3":
            writer.add_sliding_window_pattern(len(config.layer_types))  # the last one has no window
        if architecture == "exaone4":
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if rope.get("mscale_all_dim"):
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    rotated = getattr(config, "qk_rope_head_dim", None) or int(head_dim * rope.get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(rotated)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_eos_token_id(2)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(getattr(config, "layer_norm_eps", None) or config.norm_epsilon)
    numbers = {
        "num_local_experts": writer.add_expert_count,
        "n_shared_experts": writer.add_expert_shared_count,
        "first_k_dense_replace": writer.add_leading_dense_block_count,
        "routed_scaling_factor": writer.add_expert_weights_scale,
        "num_experts_per_tok": writer.add_expert_used_count,
        "moe_intermediate_size": writer.add_expert_feed_forward_length,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "attention_multiplier": writer.add_attention_scale,
        "logits_scaling": writer.add_logit_scale,
        "logit_scale": writer.add_logit_scale,
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
    }
    for name, add in numbers.items():
        if getattr(config, name, None) is not None:
            add(getattr(config, name))
