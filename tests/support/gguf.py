"""GGUF files of tiny models, written as llama.cpp's converter does."""

import json

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType, TokenType, quants

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
    writer.add_tokenizer_pre("default")
    writer.add_token_list(sorted(model["vocab"], key=model["vocab"].get))
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(model["vocab"]) - 3))
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_chat_template(tokenizer.chat_template)


def write_gguf(path, model, kind=GGMLQuantizationType.F32, architecture="llama", extra=(), tokenizer=None, rope=None):
    """Write a transformers Llama to a GGUF file: `extra` tensors, a byte-level `tokenizer`, `rope` scaling by YaRN."""
    config, state = model.config, {k: v.float().numpy() for k, v in model.state_dict().items()}
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
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
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
