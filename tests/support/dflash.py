"""Random DFlash drafters of tiny targets, and what they compute, in plain torch."""

import json

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.support.heads import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, VOCAB, WIDTH

MASK, BLOCK = 9, 6


def save_dflash(folder, seed=0, layers=2, taps=(0, 2), markov=0, **config):
    """Save a random DFlash drafter of a target; with a rank `markov`, a DSpark one."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {
        **{"fc": (HIDDEN, len(taps) * HIDDEN), "hidden_norm": (HIDDEN,), "norm": (HIDDEN,)},
    }
    for index in range(layers):
        own = {
            **{"self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN), "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN)},
            **{"self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM)},
            **{"self_attn.q_norm": (HEAD_DIM,), "self_attn.k_norm": (HEAD_DIM,), "input_layernorm": (HIDDEN,)},
            **{"post_attention_layernorm": (HIDDEN,), "mlp.gate_proj": (WIDTH, HIDDEN), "mlp.up_proj": (WIDTH, HIDDEN)},
            "mlp.down_proj": (HIDDEN, WIDTH),
        }
        sizes |= {f"layers.{index}.{name}": size for name, size in own.items()}
    if markov:
        sizes |= {f"markov_head.markov_w{i}": (VOCAB, markov) for i in (1, 2)}
        sizes |= {"confidence_head.proj": (1, HIDDEN)}
        own = {"target_layer_ids": list(taps), "mask_token_id": MASK, "markov_rank": markov}
        config = {"architectures": ["Qwen3DSparkModel"], "dflash_config": {}} | own | config
    tensors = {
        f"{name}.weight": 0.5 + torch.rand(size, generator=generator)
        if len(size) == 1
        else 0.1 * torch.randn(size, generator=generator)
        for name, size in sizes.items()
    }
    values = {
        **{"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": HIDDEN, "vocab_size": VOCAB},
        **{"intermediate_size": WIDTH, "num_hidden_layers": layers, "num_attention_heads": HEADS},
        **{"num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "rms_norm_eps": 1e-6, "rope_theta": 10000.0},
        **{"max_position_embeddings": 2048, "hidden_act": "silu", "block_size": BLOCK},
        "dflash_config": {"target_layer_ids": list(taps), "mask_token_id": MASK},
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values | config))
    save_file(tensors, folder / "model.safetensors")
    return folder


class DFlashReference:
    """A DFlash drafter over all of the context, a formula at a time."""

    def __init__(self, folder, target):
        self.weights, self.target = load_file(folder / "model.safetensors"), target
        self.config = json.loads((folder / "config.json").read_text())

    def _norm(self, x, name):
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], 1e-6)

    def _linear(self, x, name):
        return x @ self.weights[f"{name}.weight"].T

    @torch.no_grad()
    def logits(self, ids, depth, drafted=()):
        """Return logits `[depth, vocab]` behind a text, of which the target has run all tokens but the last.

        Those of DSpark depend on the tokens `drafted`.
        """
        values = self.config | self.config["dflash_config"]
        hidden = self.target(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
        taps = torch.cat([hidden[layer + 1][0] for layer in values["target_layer_ids"]], -1)
        context = self._norm(self._linear(taps, "fc"), "hidden_norm")
        x = self.target.get_input_embeddings()(torch.tensor([ids[-1], *[MASK] * depth])[: depth + (not drafted)])
        kinds = self.config.get("layer_types", ["full_attention"] * self.config["num_hidden_layers"])
        for index, kind in enumerate(kinds):
            x = self._layer(f"layers.{index}.", x, context, kind == "sliding_attention")
        logits = self.target.get_output_embeddings()(self._norm(x[-depth:], "norm"))
        if drafted:
            before = self.weights["markov_head.markov_w1.weight"][torch.tensor([ids[-1], *drafted])[:depth]]
            logits = logits[: len(before)] + self._linear(before, "markov_head.markov_w2")
        return logits

    def _layer(self, name, x, context, causal):
        normed, start = self._norm(x, f"{name}input_layernorm"), len(context)
        both = torch.cat((context, normed))
        heads = [
            self._linear(rows, f"{name}self_attn.{part}_proj").unflatten(-1, (-1, HEAD_DIM))
            for part, rows in (("q", normed), ("k", both), ("v", both))
        ]
        q, k = (self._norm(part, f"{name}self_attn.{each}_norm") for part, each in zip(heads[:2], "qk", strict=True))
        positions = torch.arange(start + len(x))
        q, k, v = _rotated(q, positions[start:]), _rotated(k, positions), heads[2]
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5
        if causal:
            scores = scores.masked_fill(positions[start:, None] < positions, float("-inf"))
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        x = x + self._linear(out, f"{name}self_attn.o_proj")
        normed = self._norm(x, f"{name}post_attention_layernorm")
        gate = F.silu(self._linear(normed, f"{name}mlp.gate_proj"))
        return x + self._linear(gate * self._linear(normed, f"{name}mlp.up_proj"), f"{name}mlp.down_proj")


def _rotated(x, positions):
    angles = positions[:, None] * 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = (torch.cat((each, each), 1)[:, None] for each in (angles.cos(), angles.sin()))
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin
