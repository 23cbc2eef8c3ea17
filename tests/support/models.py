"""Tiny seeded models and a byte-level tokenizer: the references of the tests, made with transformers, from no hub."""

import copy

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VARIANTS = {
    "llama": ("llama", {}),
    "llama-mha-untied": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama-biased": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen3-uneven": ("qwen3", {"head_dim": 32, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "mqa": ("llama", {"num_key_value_heads": 1}),
}
_PARTIAL = {"rope_theta": 10000.0, "partial_rotary_factor": 0.75}
_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [2.0 + 0.5 * i for i in range(6)],
}
_LOCAL = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
}
_WINDOW = {"sliding_window": 21, "layer_types": ["sliding_attention", "full_attention"]}
_GEMMA = _WINDOW | {"head_dim": 16, "tie_word_embeddings": True}
_GEMMA4 = {"head_dim": 16, "global_head_dim": 32, "sliding_window": 21, "hidden_size_per_layer_input": 0}
_GEMMA4 |= {"num_hidden_layers": 6, "layer_types": _WINDOW["layer_types"] * 3}
_GEMMA4 |= {
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
}
_OWN_EMBEDDINGS = {"hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 267}
_GRANITE = {"embedding_multiplier": 6.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 3.0}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_YARN = {
    "rope_parameters": {
        **{"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256, "rope_theta": 150000.0},
        **{"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    }
}
_GROWING = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
_GROWING |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}
_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "head_dim": 16}
_LINEAR = {
    **{"num_hidden_layers": 4, "head_dim": 16, "rope_parameters": {"rope_type": "default"} | _PARTIAL},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32},
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
_ROUTED = {"num_hidden_layers": 3, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_ROUTED |= {"n_shared_experts": 2, "routed_scaling_factor": 1.7, "first_k_dense_replace": 1}
_LATENT = {"kv_lora_rank": 32, "q_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 16}
_LATENT |= {"num_key_value_heads": 4}
_MSCALED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
_MSCALED |= {"mscale": 0.7, "mscale_all_dim": 0.7}
_MLPS = ["dense", "sparse", "sparse"]
_PARTIAL_ROPE = {"rope_parameters": {"rope_type": "default"} | _PARTIAL}
_SHARED_EXPERT = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SHARED_EXPERT |= {"shared_expert_intermediate_size": 48}
FAMILY_CASES = {  # of every family but those of VARIANTS: a line here is all that its tests need
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "phi3": ("phi3", {"rope_parameters": {"rope_type": "default"} | _PARTIAL}),
    "phi3-long": ("phi3", {"rope_parameters": _LONGROPE | _PARTIAL, "original_max_position_embeddings": 64}),
    "granite": ("granite", _GRANITE),
    "olmo2": ("olmo2", {}),
    "glm4": ("glm4", {"head_dim": 32}),
    "starcoder2": ("starcoder2", {}),
    "cohere": ("cohere", {"logit_scale": 0.5}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "qwen3-moe": ("qwen3_moe", _EXPERTS | {"norm_topk_prob": True, "head_dim": 32}),
    "granite-moe": ("granitemoe", _GRANITE | {"num_local_experts": 4, "intermediate_size": 32}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}),
    "qwen3-moe-mixed": ("qwen3_moe", _EXPERTS | {"decoder_sparse_step": 2}),
    "gemma2": ("gemma2", _GEMMA | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0}),
    "gemma3": ("gemma3_text", _GEMMA | {"query_pre_attn_scalar": 16} | _LOCAL),
    "gemma4": ("gemma4_text", _GEMMA4 | {"num_kv_shared_layers": 3, "use_double_wide_mlp": True, **_OWN_EMBEDDINGS}),
    "gemma4-large": ("gemma4_text", _GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "olmo3": ("olmo3", _WINDOW | _LOCAL),
    "cohere2": ("cohere2", {"sliding_window": 21, "num_hidden_layers": 4, "logit_scale": 0.5}),
    "ministral": ("ministral", _WINDOW | {"head_dim": 16}),
    "ministral3": ("ministral3", {"rope_parameters": _GROWING, "max_position_embeddings": 512, "head_dim": 16}),
    "seed-oss": ("seed_oss", {"head_dim": 32}),
    "ernie4.5": ("ernie4_5", {"head_dim": 32}),
    "exaone4": ("exaone4", {"sliding_window": 21, "num_hidden_layers": 4}),
    "exaone4-small": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "deepseek-v3": ("deepseek_v3", _ROUTED | _LATENT | {"n_group": 4, "topk_group": 2, "rope_parameters": _MSCALED}),
    "glm4-flash": ("glm4_moe_lite", {**_ROUTED, **_LATENT, "q_lora_rank": None, "mlp_layer_types": _MLPS}),
    "glm4-moe": ("glm4_moe", _ROUTED | _PARTIAL_ROPE | {"use_qk_norm": True, "attention_bias": True}),
    "gpt-oss": ("gpt_oss", _WINDOW | _YARN | _OSS),
    "qwen3-next": ("qwen3_next", _LINEAR | _SHARED_EXPERT),
    "qwen3.5": ("qwen3_5_text", _LINEAR | {"tie_word_embeddings": True}),
    "qwen3.5-moe": ("qwen3_5_moe_text", _LINEAR | _SHARED_EXPERT | {"linear_num_value_heads": 2}),
}
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("Ġ", "a"), ("e", "r"), ("o", "n"), ("Ġ", "w")]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(special=SPECIAL, alphabet=None, merges=MERGES) -> PreTrainedTokenizerFast:
    """Make a byte-level BPE tokenizer over all 256 bytes with a few merges and ChatML's special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet()) if alphabet is None else alphabet
    pieces = [*special, *alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=special[2],
        additional_special_tokens=list(special[:2]),
        chat_template=TEMPLATE,
    )


def make_hf_model(family: str, seed: int = 0, **changes) -> torch.nn.Module:
    """Make a small random model of a family, with norms and biases unlike their initial values.

    Weights are large enough that logits differ clearly, so that a forgotten bias or a wrong head is noticed.
    """
    settings = {
        "vocab_size": 267,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    config = AutoConfig.for_model(family, **copy.deepcopy(settings | changes))  # it changes its arguments
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
            elif name.endswith("sinks"):
                weight.normal_(mean=1.0)
            elif "conv1d" in name:
                weight.normal_(std=0.5)
            elif name.endswith("A_log"):
                weight.uniform_(-6, -2)  # slow decays: outputs near zero, whose norms amplify rounding, are rare
            elif name.endswith("bias"):
                weight.normal_(std=0.2)
            else:
                weight.normal_(std=0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.7, 1.3)
            elif name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.2)
    return model


def ids(count, seed=0):
    """Return random token ids of the tiny models, none of them special."""
    return torch.randint(3, 267, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def id_tensor(count, seed=0):
    """Return random token ids of the tiny models as a tensor `[count]`."""
    return torch.randint(0, 267, (count,), generator=torch.Generator().manual_seed(seed))
