"""A middle level over packed keys and values in two planes: all tokens, by plane A, which is on the device."""

from torch import Tensor

from ..memory.store import Store, append
from ..memory.tree_attention import Tree
from ..settings.kv_formats import PLANE_KV
from ..settings.validation import require
from .selected import InPlaceCache


class PlaneCache(InPlaceCache):
    """Attends to all tokens; of the packed ones it reads plane A alone, 8 of 12 bits. The newest are as they are.

    Nothing is scored, and nothing copied: a selection is of everything.
    """

    _store: Store

    def _allocate(self) -> None:
        store = self._full.store
        require(store.has_planes, "--middle plane reads what --offload planes keeps", "use that, or leave --middle out")
        self._store = store

    @property
    def read_share(self) -> float:
        return PLANE_KV.bits / 16

    def begin(self, tokens: int, tree: Tree | None = None) -> None:
        super().begin(tokens, tree)
        exact = self._full.length
        self._store.open_draft(min(self.length, exact), max(self.start + tokens, exact))

    def _use(self, chosen: Tensor, chunks: int) -> None:
        self.selection = chosen

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, lse: Tensor | None = None) -> Tensor:
        q = append(self._store, layer, self.start, q, k, v, self.rows_of(layer), self.stored)
        return self._store.attend_plane(layer, q, self.length, self.tree, lse)
