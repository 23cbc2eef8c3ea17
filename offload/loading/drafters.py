"""Opens and loads trained drafters of a target, of whichever kind."""

from pathlib import Path

from ..architecture.assistant_shape import is_assistant
from ..architecture.config import ModelShape
from ..architecture.dflash_shape import is_dflash
from ..kernels.ops import Operations
from ..model.decoder import Model
from ..model.heads import Head
from .assistants import AssistantCheckpoint, load_assistant
from .checkpoint_json import read_json
from .dflash import DFlashCheckpoint, load_dflash
from .heads import HeadCheckpoint, checked_head, is_head_folder, load_head


def is_drafter_folder(path: Path) -> bool:
    """Return whether a path is the folder of a drafter of one target, and not of a model. Raises CheckpointError."""
    if not path.is_dir():
        return False
    config = read_json(path / "config.json")
    return is_head_folder(path) or is_assistant(config) or is_dflash(config)


def checked_drafter(path: Path, target: ModelShape, is_mtp: bool = False) -> HeadCheckpoint:
    """Return a drafter of a target that has been checked; `is_mtp`: the head in the target's own checkpoint.

    Raises SettingsError if it is for another target, UnsupportedModel, CheckpointError, ModelNotFound.
    """
    config = {} if is_mtp else read_json(path / "config.json")
    if not is_assistant(config) and not is_dflash(config):
        return checked_head(path, target, is_mtp)
    checkpoint = (AssistantCheckpoint if is_assistant(config) else DFlashCheckpoint)(path, target)
    checkpoint.check()
    return checkpoint


def load_drafter(checkpoint: HeadCheckpoint, target: Model, operations: Operations, level: str | None = None) -> Head:
    """Load a drafter of a loaded target, from a checkpoint that has been checked.

    Its matrices are rounded to a `level` (q4, q5, q6, q8), if one is given: no output depends on it.
    """
    if isinstance(checkpoint, AssistantCheckpoint):
        return load_assistant(checkpoint, target, operations, level)
    if isinstance(checkpoint, DFlashCheckpoint):
        return load_dflash(checkpoint, target, operations, level)
    return load_head(checkpoint, target, operations, level)
