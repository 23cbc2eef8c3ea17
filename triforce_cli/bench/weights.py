"""What identifies the weights of the models of a benchmark: a file of finished runs is not continued with others'."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from offload.api.opened_model import OpenModel
from offload.loading.weights_digest import weights_digest
from offload.settings.config import Speculation
from offload.settings.method_sizes import has_draft_model

from ..run.prompt_cache import prompt_folder


@dataclass(frozen=True, slots=True)
class Weights:
    """The digests of the model's and the draft model's weight files; None where they were not read."""

    model: str | None = None
    draft: str | None = None

    def read_by(self, method: Speculation) -> dict[str, str]:
        """Return the digests, by name, of the weights that a method runs."""
        found = {"weights": self.model, "draft_weights": self.draft if has_draft_model(method) else None}
        return {name: digest for name, digest in found.items() if digest is not None}


def weights_of(model: OpenModel, home: Path | None) -> Weights:
    """Read the weight files, or what was noted of them beside the prompt cache. Raises OSError."""
    folder = prompt_folder(home, 0).path
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        pass  # the next run reads the files again
    notes = folder / "weights.json"
    draft = None if model.draft is None else weights_digest(model.draft.extents(), notes)
    return Weights(weights_digest(model.checkpoint.extents(), notes), draft)
