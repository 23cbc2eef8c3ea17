"""Opens, checks and loads DFlash and DSpark drafters."""

from collections.abc import Iterator
from pathlib import Path

from ..architecture.config import ModelShape
from ..architecture.config_checks import check_of_config
from ..architecture.dflash_shape import DFlashShape, dflash_shape
from ..architecture.head_shape import HeadDimensions
from ..errors import UnsupportedModel
from ..kernels.ops import Operations
from ..model.decoder import Model
from ..model.dflash import DFlash
from .checkpoint_json import read_json
from .heads import HeadCheckpoint
from .weights import load_layer

_LATER = ("candidate_selector", "attention_conv", "mlp_conv")  # tensors of DFlash2
_MARKOV = ("markov_head.markov_w1", "markov_head.markov_w2")


def _name(name: str) -> str:
    """Return the decoder's name of a tensor."""
    name = name.removeprefix("model.")
    return f"model.{name}" if name.startswith(("layers.", "norm.")) else name


class DFlashCheckpoint(HeadCheckpoint):
    """A DFlash or DSpark drafter in a folder of its own. Copies of the target's embedding and head are not read."""

    head: DFlashShape

    def __init__(self, path: Path, target: ModelShape) -> None:
        """Read the config of a DFlash drafter for a target. Raises as HeadCheckpoint."""
        self.head = dflash_shape(read_json(path / "config.json"), target, check_of_config(path / "config.json"))
        self._open(path, self.head.layers, _name)

    @property
    def dimensions(self) -> HeadDimensions:
        return self.head.dimensions

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden = self.shape.hidden
        yield "fc.weight", (hidden, len(self.head.taps) * self.head.target_hidden)
        for name in ("hidden_norm.weight", "model.norm.weight"):
            yield name, (hidden,)
        yield from self._of_layers()

        for name in _MARKOV if self.head.markov else ():
            yield f"{name}.weight", (self.shape.vocab, self.head.markov)

    def check(self) -> None:
        if later := [name for name in self.sizes() if any(part in name for part in _LATER)]:
            raise UnsupportedModel(f"DFlash2 ({later[0]}) is not supported", "draft with a DFlash or DSpark drafter")
        super().check()

    def load(self, target: Model, operations: Operations, level: str | None = None) -> DFlash:
        own = self.head
        with self.opened(target, operations, level) as (_, reader):
            layers = [load_layer(reader, own.layers, index) for index in range(own.layers.layers)]
            hidden, norm = (reader.norm(name) for name in ("hidden_norm.weight", "model.norm.weight"))
            weights = own, target, operations, reader.linear(False, "fc"), (hidden, hidden, norm), layers
            if not own.markov:
                return DFlash(*weights)
            before, bias = _MARKOV
            return DFlash(*weights, markov=(reader.table(before).rows, reader.linear(False, bias)))
