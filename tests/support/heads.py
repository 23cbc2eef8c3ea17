"""Random EAGLE-3 and MTP heads of tiny targets, and what they compute, in plain torch."""

import json

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.support.models import make_hf_model

HIDDEN, VOCAB, LAYERS = 64, 267, 4  # of the target
HEADS, KV_HEADS, HEAD_DIM, WIDTH = 4, 2, 16, 96


def _layer(new, prefix, inputs, qk_norm):
    sizes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, inputs),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, inputs),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, inputs),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (WIDTH, HIDDEN),
        "mlp.up_proj": (WIDTH, HIDDEN),
        "mlp.down_proj": (HIDDEN, WIDTH),
    }
    found = {f"{prefix}{name}.weight": new(*size) for name, size in sizes.items()}
    norms = ["input_layernorm", "post_attention_layernorm"]
    found |= {f"{prefix}{name}.weight": new(HIDDEN, norm=True) for name in norms}
    if qk_norm:
        found |= {f"{prefix}self_attn.{x}_norm.weight": new(HEAD_DIM, norm=True) for x in "qk"}
    return found


def save_eagle3(
    folder,
    seed=0,
    layers=1,
    vocab=90,
    is_speculators=False,
    taps=(0, 2, 3),
    absolute=False,
    known=VOCAB,
    **config,
):
    """Save a random EAGLE-3 head of a target of LAYERS layers that knows `known` tokens."""
    generator = torch.Generator().manual_seed(seed)

    def new(*size, norm=False):
        if norm:
            return 0.5 + torch.rand(size, generator=generator)
        return 0.1 * torch.randn(size, generator=generator)

    family = config.pop("model_type", "llama")
    first = "layers.0." if is_speculators else "midlayer."
    tensors = {"fc.weight": new(HIDDEN, len(taps) * HIDDEN), f"{first}hidden_norm.weight": new(HIDDEN, norm=True)}
    tensors |= _layer(new, first, 2 * HIDDEN, family == "qwen3")
    for index in range(1, layers):
        tensors |= _layer(new, f"layers.{index}.", HIDDEN, family == "qwen3")
    tensors |= {"norm.weight": new(HIDDEN, norm=True), "lm_head.weight": new(vocab, HIDDEN)}
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = new(len(taps) * HIDDEN, norm=True)
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": new(HIDDEN, norm=True) for i in range(len(taps))}
    if vocab < known:
        ids = torch.randperm(known, generator=generator)[:vocab]
        tensors["d2t"] = ids.clone() if absolute else ids - torch.arange(vocab)
        tensors["t2d"] = torch.zeros(known, dtype=torch.bool).index_fill_(0, ids, True)
    own = {
        **{"model_type": family, "hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_hidden_layers": layers},
        **{
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "vocab_size": known,
        },
        **{"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 2048, "hidden_act": "silu"},
    }
    head = {"draft_vocab_size": vocab, "eagle_aux_hidden_state_layer_ids": list(taps)} | config
    if is_speculators:
        verifier = {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]}
        head |= {"speculators_model_type": "eagle3", "transformer_layer_config": own}
        head |= {"speculators_config": {"algorithm": "eagle3", "verifier": verifier}}
    else:
        head |= own | {"architectures": ["LlamaForCausalLMEagle3"]}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(head))
    save_file(tensors, folder / "model.safetensors")
    return folder


def add_mtp(folder, family, **changes):
    """Add a random MTP head to a saved target of Qwen's; return its layer and norm as a model of transformers.

    That is without fc and its norms, which are returned by their names.
    """
    own = make_hf_model(family, 5, **changes | {"num_hidden_layers": 1, "layer_types": ["full_attention"]})
    generator = torch.Generator().manual_seed(1)
    more = {"fc.weight": 0.1 * torch.randn((HIDDEN, 2 * HIDDEN), generator=generator)}
    for name in ("embedding", "hidden"):
        more[f"pre_fc_norm_{name}.weight"] = torch.rand(HIDDEN, generator=generator) - 0.5
    names = ("layers.0.", "norm.")
    head = more | {name: x for name, x in own.model.state_dict().items() if name.startswith(names)}
    tensors = load_file(folder / "model.safetensors") | {f"mtp.{name}": x.contiguous() for name, x in head.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 1}))
    return own, more


def _norm(x, weight):
    return F.rms_norm(x, weight.shape, weight, 1e-6)


def _rotated(x, theta=10000.0):
    """Rotate heads `[slots, heads, head_dim]` at positions from 0 on."""
    angles = torch.arange(len(x)).unsqueeze(1) * theta ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = torch.cat((angles, angles), 1).cos().unsqueeze(1), torch.cat((angles, angles), 1).sin().unsqueeze(1)
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


class Eagle3Reference:
    """The head in a folder, in plain torch and over all slots at once."""

    def __init__(self, folder, embedding):
        tensors = load_file(folder / "model.safetensors")
        self.weights = {name.replace("midlayer.", "layers.0."): x for name, x in tensors.items()}
        self.config = json.loads((folder / "config.json").read_text())
        self._embedding = embedding

    def features(self, taps):
        """Return features `[slots, hidden]` of taps `[slots, taps * hidden]`."""
        if self.config.get("norm_before_fc"):
            taps = _norm(taps, self.weights["input_norm.weight"])
        if self.config.get("fc_norm"):
            parts = taps.split(HIDDEN, 1)
            taps = torch.cat([_norm(x, self.weights[f"fc_norm.{i}.weight"]) for i, x in enumerate(parts)], 1)
        return taps @ self.weights["fc.weight"].T

    def rows(self, ids, features):
        """Return the rows `[slots, hidden]` behind the last layer."""
        prefix = "layers.0."
        e = _norm(self._embedding[ids], self.weights[f"{prefix}input_layernorm.weight"])
        normed = _norm(features, self.weights[f"{prefix}hidden_norm.weight"])
        is_normed = self.config.get("norm_before_residual", "speculators_model_type" in self.config)
        x = self._layer(prefix, torch.cat((e, normed), 1), normed if is_normed else features)
        layers = self.config.get("transformer_layer_config", self.config)["num_hidden_layers"]
        for index in range(1, layers):
            prefix = f"layers.{index}."
            x = self._layer(prefix, _norm(x, self.weights[f"{prefix}input_layernorm.weight"]), x)
        return x

    def _layer(self, prefix, a, residual):
        weights = {name.removeprefix(prefix): x for name, x in self.weights.items() if name.startswith(prefix)}
        q, k, v = ((a @ weights[f"self_attn.{x}_proj.weight"].T).view(len(a), -1, HEAD_DIM) for x in ("q", "k", "v"))
        if "self_attn.q_norm.weight" in weights:
            q, k = (_norm(x, weights[f"self_attn.{n}_norm.weight"]) for x, n in ((q, "q"), (k, "k")))
        q, k, v = (x.transpose(0, 1) for x in (_rotated(q), _rotated(k), v))
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
        y = residual + attended @ weights["self_attn.o_proj.weight"].T
        normed = _norm(y, weights["post_attention_layernorm.weight"])
        gated = F.silu(normed @ weights["mlp.gate_proj.weight"].T) * (normed @ weights["mlp.up_proj.weight"].T)
        return y + gated @ weights["mlp.down_proj.weight"].T

    def logits(self, rows):
        """Return logits over the target's vocabulary."""
        own = _norm(rows, self.weights["norm.weight"]) @ self.weights["lm_head.weight"].T
        if "d2t" not in self.weights:
            return own
        ids = self.weights["d2t"] + torch.arange(own.shape[1])
        return torch.full((len(rows), VOCAB), float("-inf")).index_copy_(1, ids, own)

    def recycled(self, rows):
        return _norm(rows, self.weights["norm.weight"]) if self.config.get("norm_output") else rows
