"""The protocol of checkpoints, and the reader of folders with config.json and safetensors.

Nothing is unpickled and no code from a checkpoint is run. A damaged file is found by its header, before any weight is
read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from ..architecture.config import FAMILIES, ModelShape, shape_from_config
from ..architecture.config_checks import check_of_config
from ..errors import CheckpointError, ModelNotFound, TriforceError, UnsupportedModel
from ..short_repr import short_text

_READ = (  # keys of config.json, beside the family's name
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "tie_word_embeddings", "eos_token_id"),
    *("attention_bias", "mlp_bias", "sliding_window", "use_sliding_window", "quantization_config"),
    *("max_position_embeddings", "original_max_position_embeddings", "partial_rotary_factor"),
    *("rope_parameters", "rope_scaling", "rope_theta"),
)
_FLOATS = ("F64", "F32", "F16", "BF16")  # safetensors' names


class Checkpoint(Protocol):
    """A model's shape, and its tensors under transformers' names."""

    path: Path
    shape: ModelShape
    generation: dict  # generation_config.json, or {}

    def files(self) -> list[Path]:
        """Return the files that contain the weights."""
        ...

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Return every tensor's name and size, from the headers. Raises CheckpointError, UnsupportedModel."""
        ...

    def tensors(self) -> Any:
        """Return a context manager that yields `read(name, part=None) -> Tensor`, on the CPU, in the stored dtype.

        With `part`, slices of rows and columns, only that part is read where the format allows it.
        """
        ...

    def load_tokenizer(self) -> Any:
        """Return transformers' fast tokenizer. Raises CheckpointError."""
        ...


def read_json(path: Path) -> dict:
    """Read a JSON object from a file of a checkpoint; {} if there is no such file. Raises CheckpointError."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {short_text(str(error))}", "fetch the model again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object", "fetch the model again")
    return value


class FolderCheckpoint:
    """A folder as transformers saves it: config.json, safetensors in one file or in shards, tokenizer files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        config = read_json(path / "config.json")
        if not config:
            raise ModelNotFound(f"{path} has no config.json", "--model takes a folder with config.json and safetensors")
        self.generation = read_json(path / "generation_config.json")
        try:
            self.shape = shape_from_config(_hf_config(path, config), self.generation)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise CheckpointError(
                f"{path / 'config.json'} is not usable: {short_text(str(error))}", "fetch the model again"
            ) from error
        self._files = _weight_files(path)

    def files(self) -> list[Path]:
        return [self.path / name for name in self._files]

    def sizes(self) -> dict[str, tuple[int, ...]]:
        sizes = {}
        for name in sorted(set(self._files)):
            with _opened(self.path / name) as file:
                for key in file.keys():  # noqa: SIM118
                    tensor = file.get_slice(key)
                    if key.endswith((".weight", ".bias")) and tensor.get_dtype() not in _FLOATS:
                        raise UnsupportedModel(
                            f"{self.path / name}: {key} is stored as {tensor.get_dtype()}, not as {', '.join(_FLOATS)}",
                            "use the unquantised model, or a GGUF file of it",
                        )
                    sizes[key] = tuple(tensor.get_shape())
        return sizes

    @contextmanager
    def tensors(self) -> Iterator[Any]:
        with ExitStack() as stack:
            files = [stack.enter_context(_opened(self.path / name)) for name in self._files]
            file_of = {key: file for file in files for key in file.keys()}  # noqa: SIM118

            def read(name: str, part: tuple[slice, ...] | None = None) -> Any:
                return file_of[name].get_tensor(name) if part is None else file_of[name].get_slice(name)[part]

            yield read

    def load_tokenizer(self) -> Any:
        return load_hf_tokenizer(self.path, {})


def _hf_config(path: Path, values: dict) -> Any:
    """Return transformers' config of the keys that the decoder reads, and of no others, which could cost memory."""
    from transformers import CONFIG_MAPPING

    family = values.get("model_type")
    if family not in FAMILIES:
        names = values.get("architectures")
        names = ", ".join(map(str, names)) if names and isinstance(names, list) else names or "without a name"
        raise UnsupportedModel(
            f"the architecture {short_text(str(names))} ({short_text(str(family))}) is not supported",
            f"what runs: {', '.join(FAMILIES)}",
        )
    check_of_config(path / "config.json").check(values)
    try:
        return CONFIG_MAPPING[family].from_dict({name: values[name] for name in _READ if name in values})
    except Exception as error:  # transformers' validators raise many types
        raise CheckpointError(
            f"{path / 'config.json'} is not a usable config: {short_text(str(error))}", "fetch the model again"
        ) from error


def _weight_files(path: Path) -> list[str]:
    """Return the names of a folder's weight files. Raises CheckpointError, ModelNotFound."""
    index = read_json(path / "model.safetensors.index.json")
    if index:
        shards = index.get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise CheckpointError(f"{path / 'model.safetensors.index.json'} has no weight map", "fetch the model again")
        files = sorted(set(shards.values()))
    elif (path / "model.safetensors").exists():
        files = ["model.safetensors"]
    else:
        pickled = any(path.glob("*.bin")) or any(path.glob("*.pt*"))
        reason = "only pickled weights, which can run code when read" if pickled else "no model.safetensors"
        hint = f"`triforce pull {path}` converts pytorch_model.bin once, safely; or use a .gguf file"
        raise ModelNotFound(f"{path} has {reason}", hint)
    missing = [name for name in files if not _is_there(path / name)]
    if missing or not files:
        raise CheckpointError(
            f"{path} lacks {len(missing)} of {len(files)} shards: {short_text(', '.join(missing[:3]))}",
            "fetch the model again",
        )
    return files


def _is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long or contains NUL
        return False


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    if path.exists() and not os.access(path, os.R_OK):
        raise CheckpointError(f"{path} may not be read: permission denied", "look at its permissions")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is corrupt or truncated: {short_text(str(error))}", "fetch the model again"
        ) from error


def load_hf_tokenizer(folder: Path, options: dict) -> Any:
    """Load transformers' fast tokenizer from a folder. Raises CheckpointError."""
    from transformers import AutoTokenizer

    files = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if not options and not any((folder / name).exists() for name in files):
        raise CheckpointError(f"{folder} has no tokenizer.json", "copy the model's tokenizer files there too")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
    except TriforceError:
        raise
    except Exception as error:  # transformers and tokenizers raise many types for a broken file
        reason = (str(error).splitlines() or [repr(error)])[0]
        raise CheckpointError(f"the tokenizer in {folder} cannot be read: {reason}", "fetch the model again") from error
    if not tokenizer.is_fast:
        raise CheckpointError(f"the tokenizer in {folder} has no tokenizer.json", "convert it with transformers first")
    return tokenizer
