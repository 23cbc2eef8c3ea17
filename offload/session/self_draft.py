"""The quantised copy of a model that drafts for it: its level is chosen once, when the first request needs it."""

from collections.abc import Sequence

from ..loading.quantized_copy import QuantizedCopies
from ..memory.factory import TieredStoreFactory
from ..model.decoder import Model, QuantizedCopy
from ..planning.self_draft import best_level, expected_agreements, relative_costs
from ..settings.config import QUANTIZE, Speculation
from ..settings.method_sizes import budget_of


class SelfDraft:
    """Chooses and makes the copy of `model` that drafts for a request."""

    def __init__(self, model: Model, copies: QuantizedCopies, stores: TieredStoreFactory | None) -> None:
        self._model, self._copies, self._stores = model, copies, stores
        self._level: str | None = None  # once it has been chosen

    def copy_for(self, ids: Sequence[int], tokens: int, speculation: Speculation) -> QuantizedCopy:
        """Return the copy for a prompt and its answer, of `tokens` together, making it first if need be."""
        level = speculation.self_level or self._level
        if level is None:
            level = self._level = self._best_level(ids, tokens, speculation)
        return self._copies.make(level, ids)

    def _best_level(self, ids: Sequence[int], tokens: int, speculation: Speculation) -> str:
        """Choose by how many choices rounding changes on the end of `ids`, and by the bytes that steps read."""
        agreements = expected_agreements(self._copies.changed_by_q4(ids))
        model, budget = self._model, budget_of(speculation, tokens)
        kv_cost = 1.0 if self._stores is None else self._stores.read_cost(model.shape)
        costs = relative_costs(model.shape, model.read_cost, model.dtype.itemsize, tokens, budget, kv_cost)
        level = best_level(agreements, costs)
        return QUANTIZE[int(model.group.agree([QUANTIZE.index(level)])[0])]  # ranks have uneven shares
