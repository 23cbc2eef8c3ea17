"""The files of a training run: its state, to resume from, and the finished head in the `speculators` format.

A file exists as a whole or not at all.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..architecture.config import ModelShape
from ..errors import CheckpointError
from ..system.files import replace_file
from .head import Head

Verifier = tuple[str, Sequence[str]]
_LAYER = "layers.0."
_NAMES = {  # of the head's tensors, in the speculators format
    "fc": "fc",
    **{name: f"{_LAYER}{name}" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
    **{name: f"{_LAYER}self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
    **{name: f"{_LAYER}mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")},
    "norm": "norm",
    "lm_head": "lm_head",
}


def save_state(path: Path, head: Head, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write a head, its optimiser's moments and the step as one file. Raises OSError."""
    tensors = {f"head.{name}": tensor for name, tensor in head.state_dict().items()}
    for index, moments in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": tensor for name, tensor in moments.items()}
    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    replace_file(path, save(tensors, {"step": str(step)}))


def load_state(path: Path, head: Head, optimizer: torch.optim.Optimizer) -> int:
    """Load what `save_state` has written; return the step. Raises CheckpointError for the state of another head."""
    try:
        with safe_open(path, "pt") as file:
            step = int(file.metadata()["step"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        head.load_state_dict(_part(tensors, "head."))
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        hint = "remove it to begin anew, or use another --output"
        raise CheckpointError(f"{path} is not the state of this training: {error}", hint) from error
    states: dict[int, dict[str, Tensor]] = {}
    for name, tensor in _part(tensors, "optimizer.").items():
        index, _, key = name.partition(".")
        states.setdefault(int(index), {})[key] = tensor
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
    return step


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def save_head(folder: Path, head: Head, draft_ids: Tensor, target: ModelShape, verifier: Verifier) -> None:
    """Write config.json and model.safetensors of a finished head, in bf16. Raises OSError.

    `draft_ids` `[vocab]` are the target's ids of the head's tokens, `verifier` has its name and its architectures.
    """
    weights = {name: tensor.detach() for name, tensor in head.state_dict().items()}
    weights["fc"] = weights["fc"] * weights.pop("tap_scale")
    tensors = {f"{_NAMES[name]}.weight": tensor.bfloat16().cpu().contiguous() for name, tensor in weights.items()}
    ids = draft_ids.cpu()
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(target.vocab, dtype=torch.bool).index_fill(0, ids, True)
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "model.safetensors", save(tensors, {"format": "pt"}))
    config = _config(head, target, verifier)
    replace_file(folder / "config.json", (json.dumps(config, indent=2) + "\n").encode())


def _config(head: Head, target: ModelShape, verifier: Verifier) -> dict[str, Any]:
    shape = head.shape
    layer = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": target.context,
        "vocab_size": target.vocab,
        "layer_types": ["sliding_attention"],
        "sliding_window": shape.window,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    }
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier[0], "architectures": list(verifier[1])},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": shape.vocab,
        "target_hidden_size": shape.hidden,
        "eagle_aux_hidden_state_layer_ids": list(shape.taps),
        "norm_before_residual": True,
        "norm_before_fc": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
