"""A middle level over packed keys and values: all tokens, by two thirds of the bits, in place."""

from collections.abc import Hashable

from torch import Tensor

from ..kernels.native.recording import PassInputs
from ..memory.packed_store import PackedStore
from ..memory.store import Store, append
from ..memory.tree_attention import Tree
from ..settings.kv_formats import PACKED_KV, PLANE_KV
from ..settings.validation import require
from .selected import InPlaceCache


class PlaneCache(InPlaceCache):
    """Attends to all tokens; of the packed ones it reads plane A alone, 8 of 12 bits. The newest are as they are.

    Nothing is scored, and nothing copied: a selection is of everything.
    """

    _store: Store

    def _allocate(self) -> None:
        store = self._full.store
        reads = isinstance(store, PackedStore) or store.has_planes
        require(reads, "--middle plane reads packed keys and values, and there are none", "leave --middle out")
        self._store = store

    @property
    def read_share(self) -> float:
        return PLANE_KV.bits / (16 if self._store.has_planes else PACKED_KV.bits)

    def begin(self, tokens: int, tree: Tree | None = None) -> None:
        super().begin(tokens, tree)
        exact = self._full.length
        self._store.open_draft(min(self.length, exact), max(self.start + tokens, exact))

    def _use(self, chosen: Tensor, chunks: int) -> None:
        self.selection = chosen

    def begin_recorded(self, tokens: int, tree: Tree | None = None) -> tuple[Hashable, PassInputs]:
        """Begin a pass as in `RecordableCache`."""
        self.begin(tokens, tree)
        return tree is None, self._inputs(self.length + 1, self.stored)

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, lse: Tensor | None = None) -> Tensor:
        q = append(self._store, layer, self.start, q, k, v, self.rows_of(layer), self.stored)
        return self._store.attend_plane(layer, q, self.length, self.tree, lse)
