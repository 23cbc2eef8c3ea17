"""Opens and loads trained drafters of a target, of whichever kind."""

from __future__ import annotations

from pathlib import Path

from ..architecture.assistant_shape import is_assistant
from ..architecture.config import ModelShape
from ..kernels.ops import Operations
from ..model.decoder import Model
from ..model.heads import Head
from .assistants import AssistantCheckpoint, load_assistant
from .checkpoint_json import read_json
from .heads import HeadCheckpoint, checked_head, is_head_folder, load_head


def is_drafter_folder(path: Path) -> bool:
    """Return whether a path is the folder of a drafter of one target, and not of a model. Raises CheckpointError."""
    return path.is_dir() and (is_head_folder(path) or is_assistant(read_json(path / "config.json")))


def checked_drafter(path: Path, target: ModelShape, is_mtp: bool = False) -> HeadCheckpoint:
    """Return a drafter of a target that has been checked; `is_mtp`: the head in the target's own checkpoint.

    Raises SettingsError if it is for another target, UnsupportedModel, CheckpointError, ModelNotFound.
    """
    if is_mtp or not is_assistant(read_json(path / "config.json")):
        return checked_head(path, target, is_mtp)
    checkpoint = AssistantCheckpoint(path, target)
    checkpoint.check()
    return checkpoint


def load_drafter(checkpoint: HeadCheckpoint, target: Model, operations: Operations) -> Head:
    """Load a drafter of a loaded target, from a checkpoint that has been checked."""
    if isinstance(checkpoint, AssistantCheckpoint):
        return load_assistant(checkpoint, target, operations)
    return load_head(checkpoint, target, operations)
