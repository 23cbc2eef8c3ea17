"""Tiny seeded models and a byte-level tokenizer: the references of the tests, made with transformers, from no hub."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

CONFIGS = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
VARIANTS = {
    "llama": ("llama", {}),
    "llama-mha-untied": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama-biased": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen3-uneven": ("qwen3", {"head_dim": 32, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "mqa": ("llama", {"num_key_value_heads": 1}),
}
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("Ġ", "a"), ("e", "r"), ("o", "n"), ("Ġ", "w")]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a byte-level BPE tokenizer over all 256 bytes with a few merges and ChatML's special tokens."""
    pieces = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        additional_special_tokens=list(SPECIAL[:2]),
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
    config = CONFIGS[family](**settings | changes)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                weight.normal_(std=0.2)
            else:
                weight.normal_(std=0.1)
    return model


def ids(count, seed=0):
    """Return random token ids of the tiny models, none of them special."""
    return torch.randint(3, 267, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def id_tensor(count, seed=0):
    """Return random token ids of the tiny models as a tensor `[count]`."""
    return torch.randint(0, 267, (count,), generator=torch.Generator().manual_seed(seed))
