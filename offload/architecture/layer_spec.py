"""The operations of one decoder layer, and the sizes of its parts. Defaults are Llama's. Imports nothing heavy."""

from dataclasses import dataclass
from typing import Any

STATE_ROOM = 160  # tokens that linear attention can be rolled back: a block of a prompt on disk, and a draft
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"  # transformers' kinds of layers
ACTIVATIONS = {  # transformers' names -> ours
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}


@dataclass(frozen=True, slots=True)
class Heads:
    """The KV heads of a layer, and the dimensions of each of its heads."""

    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """The linear attention of a decoder's layers by the gated delta rule.

    Attributes:
        key_heads: heads of q and of k, each of which `value_heads / key_heads` value heads share.
        value_heads: heads of v, each with a state of `key_dim * value_dim` numbers.
        key_dim, value_dim: dimensions of a head.
        kernel: inputs of the causal convolution before q, k and v: the token's own, and those before it.
        layers: how many of the decoder's layers have it.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    layers: int

    @property
    def keys(self) -> int:
        """Return the numbers of a token's q, and those of its k."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Return the numbers of a token's v."""
        return self.value_heads * self.value_dim

    @property
    def width(self) -> int:
        """Return the numbers of a token's q, k and v, which the convolution has as channels."""
        return 2 * self.keys + self.values

    @property
    def state_numbers(self) -> int:
        """Return the numbers of the recurrent state of one layer."""
        return self.values * self.key_dim

    def state_bytes(self, itemsize: int) -> int:
        """Return the bytes that all layers keep for one sequence: see caches/recurrent_states.py.

        These are states at three places, two of them with the inputs of STATE_ROOM tokens behind, for rollbacks.
        """
        before = (self.kernel - 1) * self.width * itemsize
        behind = STATE_ROOM * (self.width * itemsize + 2 * self.value_heads * 4)
        return self.layers * (3 * (4 * self.state_numbers + before) + 2 * behind)


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention: the numbers of its parts.

    Attributes:
        query_rank: of a query's latent; 0 if queries have none.
        rank: of the latent that keys and values of all heads follow from.
        plain, rotated: of a head's query and key without and with RoPE; the rotated part of a key is of all heads.
        value_dim: of a head's value.
    """

    query_rank: int
    rank: int
    plain: int
    rotated: int
    value_dim: int

    @property
    def head_dim(self) -> int:
        """Return the numbers of a token that are cached: as the key of one head, and as its value."""
        return self.rank + self.rotated


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a decoder's sparse layers, whose MLP is a mixture of them.

    Attributes:
        count: experts of a layer.
        per_token: how many of them a token is routed to.
        width: the intermediate size of each.
        layers: how many of the decoder's layers are sparse.
        shared: the intermediate size of the expert that all tokens have beside those; 0 without one.
    """

    count: int
    per_token: int
    width: int
    layers: int
    shared: int = 0

    def distinct(self, tokens: float) -> float:
        """Return the expected number of experts of a layer that `tokens` tokens read together."""
        return expected_experts(self.count, self.per_token, tokens)


def expected_experts(count: int, per_token: int, tokens: float) -> float:
    """Return the expected number of experts, of `count`, that `tokens` tokens read together, each `per_token` of them.

    It is count * (1 - (1 - per_token / count) ** tokens), if each token's experts are random and independent of the
    others' (MoESD, arXiv 2505.19645). Where neighbouring tokens share more of them, they read fewer.
    """
    return count * (1 - (1 - per_token / count) ** tokens)


def activation_of(name: Any) -> str:
    """Return our name of an activation, "" for an unknown one."""
    return ACTIVATIONS.get(name, "") if isinstance(name, str) else ""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The operations of one decoder layer, apart from its dimensions.

    Attributes:
        qk_norm: "head": each head of q and k is normalised; "projection": all heads together; "": they are not.
        normalises_values: whether each head of v is normalised, too, without a weight.
        keys_are_values: whether v is k as it is before its norm.
        borrows: whether the layer has no k and v: it attends to those of the last layer before it that has, of those
            that attend to all tokens, or of those that attend to a window, as it does itself.
        norm: "rms" for RMSNorm, "layer" for LayerNorm.
        pre_norms: whether the inputs of attention and of the MLP are normalised.
        post_norms: whether their outputs are, before they are added to the residual.
        is_parallel: whether attention and MLP have the same input, which one norm normalises.
        activation: "silu", "gelu", or "gelu_tanh", its approximation by tanh, or "relu2", ReLU squared.
        is_gated: whether the MLP has a gate, whose activation is multiplied with `up`.
        width_factor: how many times as wide as `intermediate` the MLP is.
        has_scale: whether the rows behind the layer are multiplied with a learned number.
        router: the weights of a token's experts in their sum: "all": their part of a softmax over all experts;
            "chosen": a softmax over the chosen ones alone; "sigmoid": the sigmoid of their logits, divided by the sum,
            and a bias chooses them (DeepSeek-V3); "": the layer has one MLP and no experts.
        router_bias: whether the router is a linear with a bias.
        router_scale: a factor of those weights.
        router_groups: how many groups a sigmoid router divides the experts into, and how many of them a token may use.
        shares_expert: whether all tokens have one further expert.
        gates_shared_expert: whether that one is multiplied with the sigmoid of its gate.
        swiglu_limit: where a gate is gate * sigmoid(1.702 gate), and multiplied with up + 1: both are clamped at this
            limit before (gpt-oss). 0: they are not.
        rotates: whether q and k have rotary positions.
        query_scale: a factor of the attention scores on top of `head_dim ** -0.5`.
        residual_scale: a factor of what attention and MLP add to the residual.
        window: tokens that a token attends to, itself included; 0: all before it.
        soft_cap: attention scores are `soft_cap * tanh(score / soft_cap)`; 0: they are as they are.
        has_sinks: whether each head has a learned logit of a key without value in the softmax of its scores (gpt-oss).
        gates_heads: whether the output of attention is multiplied with the sigmoid of a gate, further rows of q_proj.
        is_latent: whether attention is multi-head latent attention; `query_scale` is then the whole factor of scores.
        is_linear: whether attention is linear, by the gated delta rule (arXiv 2412.06464), whose state has one size
            however long the sequence is; of the attributes of attention, none then counts.
    """

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str = ""
    normalises_values: bool = False
    keys_are_values: bool = False
    borrows: bool = False
    norm: str = "rms"
    norm_bias: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    is_parallel: bool = False
    activation: str = "silu"
    is_gated: bool = True
    width_factor: int = 1
    has_scale: bool = False
    router: str = ""
    router_bias: bool = False
    router_scale: float = 1.0
    router_groups: tuple[int, int] = (1, 1)
    shares_expert: bool = False
    gates_shared_expert: bool = True
    swiglu_limit: float = 0.0
    rotates: bool = True
    query_scale: float = 1.0
    residual_scale: float = 1.0
    window: int = 0
    soft_cap: float = 0.0
    has_sinks: bool = False
    gates_heads: bool = False
    is_latent: bool = False
    is_linear: bool = False

    @property
    def kind(self) -> str:
        """Return FULL for attention to all tokens, SLIDING for attention to a window, LINEAR for linear attention."""
        return LINEAR if self.is_linear else SLIDING if self.window else FULL

    @property
    def projections(self) -> str:
        """Return which of q, k and v have a linear."""
        return "q" if self.borrows else "qk" if self.keys_are_values else "qkv"

    @property
    def is_sparse(self) -> bool:
        """Return whether the MLP is a mixture of experts, so that which linears a pass runs depends on its tokens."""
        return bool(self.router)

    @property
    def is_native(self) -> bool:
        """Return whether the native kernel has all operations of the layer; torch runs what it lacks."""
        if self.is_sparse or self.has_sinks or self.gates_heads or self.is_linear or self.is_latent:
            return False
        if self.normalises_values or self.borrows or self.has_scale:
            return False
        plain = self.norm == "rms" and not self.post_norms and self.activation == "silu" and self.is_gated
        plain = plain and not self.window and not self.soft_cap
        return plain and self.rotates and self.query_scale == self.residual_scale == 1.0
