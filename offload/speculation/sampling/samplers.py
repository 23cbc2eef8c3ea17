"""Makes the samplers of one model's requests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from ...model.decoder import Model
from ...settings.config import Sampling
from ...settings.validation import require_instance
from .warp import Sampler

if TYPE_CHECKING:
    from ...constraints.vocabulary import ConstraintVocabulary


class Samplers:
    """Makes samplers, with DRY's sequence breakers and the masks of constraints where a request needs them."""

    def __init__(
        self, model: Model, breakers: Callable[[], Collection[int]], constraints: ConstraintVocabulary | None
    ) -> None:
        """`breakers` returns the ids of DRY's sequence breakers; it is called only for requests with DRY."""
        self._model, self._breakers, self._constraints = model, breakers, constraints

    def new(self, sampling: Sampling, seed: int, prompt: Sequence[int]) -> Sampler:
        """Return the sampler of an answer to a prompt. Raises SettingsError for a constraint that cannot be met."""
        require_instance("sampling", sampling, Sampling)
        masks = None
        if sampling.constraint is not None:
            assert self._constraints is not None, "an engine without a tokenizer has no constraints"
            masks = self._constraints.masks(sampling.constraint, prompt)
        breakers = self._breakers() if sampling.dry_multiplier > 0 else ()
        model = self._model
        return Sampler(sampling, seed, model.shape.vocab, model.device, breakers, masks)
