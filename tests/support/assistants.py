"""Tiny Gemma 4 targets, and random assistants of theirs."""

import torch
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

from tests.support.models import FAMILY_CASES, make_hf_model


def make_target():
    """Make a target with two kinds of layers, the last three of which have no keys and values."""
    return make_hf_model(*FAMILY_CASES["gemma4"][:1], **FAMILY_CASES["gemma4"][1], attn_implementation="eager")


def make_assistant(target, seed=1, centroids=None, **changes):
    """Make a random assistant of a target, of two layers and half its hidden size."""
    text = FAMILY_CASES["gemma4"][1] | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text |= {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 2, "intermediate_size": 48}
    text |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "use_double_wide_mlp": False}
    text |= {"vocab_size": target.config.vocab_size, "num_key_value_heads": 2, "attn_implementation": "eager"}
    more = {} if centroids is None else {"use_ordered_embeddings": True, "num_centroids": centroids}
    more |= {"centroid_intermediate_top_k": 2} | changes
    config = Gemma4AssistantConfig(
        text_config=Gemma4TextConfig(**text), backbone_hidden_size=target.config.hidden_size, **more
    )
    torch.manual_seed(seed)
    model = Gemma4AssistantForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.uniform_(0.5, 1.5) if "norm" in name else weight.normal_(std=0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.7, 1.3)
            if name.endswith("token_ordering"):
                buffer.copy_(torch.randperm(len(buffer)))
    return model
