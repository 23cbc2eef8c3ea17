"""Opens trained drafters of a target, of whichever kind."""

from pathlib import Path

from ..architecture.assistant_shape import is_assistant
from ..architecture.config import ModelShape
from ..architecture.dflash_shape import is_dflash
from .assistants import AssistantCheckpoint
from .checkpoint_json import read_json
from .dflash import DFlashCheckpoint
from .heads import HeadCheckpoint, is_head_folder


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
    if is_assistant(config) or is_dflash(config):
        checkpoint: HeadCheckpoint = (AssistantCheckpoint if is_assistant(config) else DFlashCheckpoint)(path, target)
    else:
        checkpoint = HeadCheckpoint(path, target, is_mtp)
    checkpoint.check()
    return checkpoint
