"""Opens a model from a configuration: finds its files, and refuses wrong requests before the weights are loaded."""

from os import PathLike
from pathlib import Path

import torch

from ..architecture.head_shape import MTP
from ..architecture.rope import check_frequencies
from ..errors import SettingsError, TriforceError
from ..kernels.ops import check_kernel
from ..loading.formats.checkpoint import Checkpoint
from ..loading.formats.tensor_checks import check_tensors
from ..loading.heads import checked_drafter, is_drafter_folder
from ..loading.hub.download import FetchProgress, locate, open_checkpoint, silent
from ..loading.hub.registry import draft_error
from ..loading.quantization_checks import check_quantize, quantized
from ..parallel import ALONE, Group
from ..settings.config import EngineConfig, Speculation, engine_config
from ..settings.method_sizes import has_draft_model
from ..settings.validation import require_instance
from .opened_model import OpenModel


def resolve_device(name: str, index: int = 0) -> torch.device:
    """Return the device of a name; `auto` is the CUDA GPU of that index, else the CPU.

    Raises SettingsError for a device that is not available.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise SettingsError("no CUDA device is available to this torch", "use --device cpu, or install torch for CUDA")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and index >= torch.cuda.device_count():
        raise SettingsError(
            f"there is no GPU {index}: torch sees {torch.cuda.device_count()}", "start as many ranks as there are GPUs"
        )
    return torch.device(name, index) if name == "cuda" else torch.device(name)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of a name; `auto` is bf16, or fp16 on GPUs without bf16: decoding is bound by bytes read."""
    if name != "auto":
        named: torch.dtype = getattr(torch, name)
        return named
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16
    return torch.bfloat16


def open_model(
    config: EngineConfig | str | PathLike[str],
    home: Path | None = None,
    progress: FetchProgress = silent,
    speculation: Speculation | None = None,
    group: Group = ALONE,
) -> OpenModel:
    """Find a model, fetching it if necessary, and check its config, headers, device, dtype and kernel.

    Args:
        config: the settings, or a model's name or path alone.
        home: triforce's cache folder; None for the platform's.
        progress: called during a fetch.
        speculation: the decoding method; a draft model is found and checked as well.
        group: the ranks that share the model.

    Raises:
        ModelNotFound, UnsupportedModel, CheckpointError, FetchError, SettingsError.
    """
    config = engine_config(config)
    if speculation is not None:
        require_instance("speculation", speculation, Speculation)
    device = resolve_device(config.device, group.local)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dtype = resolve_dtype(config.dtype, device)
    check_kernel(config.kernel)  # before a model is fetched in vain
    check_quantize(config, device, dtype)
    checkpoint = quantized(_checked(locate(config.model, home, progress)), config, device, dtype)
    settings = speculation or Speculation()
    draft = None
    if has_draft_model(settings) and settings.draft_model is not None:
        draft = _open_draft(settings.draft_model, checkpoint, home, progress)
    opened = OpenModel(config, checkpoint, device, dtype, settings, draft, group)
    opened.check()
    return opened


def _open_draft(name: str, target: Checkpoint, home: Path | None, progress: FetchProgress) -> Checkpoint:
    """Find a draft model, or a head of the target, and check it."""
    try:
        if name == MTP:
            return checked_drafter(target.path, target.shape, is_mtp=True)
        path = locate(name, home, progress)
        if is_drafter_folder(path):
            return checked_drafter(path, target.shape)
        return _checked(path)
    except TriforceError as error:
        raise draft_error(error) from error


def _checked(path: Path) -> Checkpoint:
    checkpoint = open_checkpoint(path)
    check_tensors(checkpoint)
    check_frequencies(checkpoint.shape)
    return checkpoint
