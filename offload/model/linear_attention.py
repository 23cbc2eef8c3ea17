"""The weights of a layer with linear attention, and what it computes beside the rule that its state follows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from ..kernels.delta_rule import DeltaRule
from ..kernels.ops import LocalLinear

AttendLinear = Callable[[DeltaRule, Tensor, Tensor], Tensor]  # as `Attends.attend_linear` of one layer


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """The weights of a layer with a gated delta rule, but for those of the output."""

    inputs: LocalLinear  # [width + values, hidden]: q, k and v, and the output's gate
    gates: LocalLinear  # [2 * value_heads, hidden]: of rates and decays
    rule: DeltaRule
    norm: Tensor  # [value_dim] in fp32

    def attended(self, x: Tensor, epsilon: float, attend: AttendLinear) -> Tensor:
        """Return normalised and gated outputs of all heads `[tokens, values]` for rows `[tokens, hidden]`."""
        sizes = self.rule.sizes
        rows, gate = self.inputs(x).split((sizes.width, sizes.values), dim=-1)
        out = attend(self.rule, rows, self.gates.wide(x))
        out = F.rms_norm(out, self.norm.shape, self.norm, epsilon).flatten(1)
        return (out * F.silu(gate.float())).to(x.dtype)

    def tensors(self) -> list[Tensor]:
        """Return the tensors of the linears."""
        return [*self.inputs.tensors(), *self.gates.tensors()]
