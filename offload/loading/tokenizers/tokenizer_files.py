"""Loads a checkpoint's tokenizer: tokenizer.json with the `tokenizers` library, and others with transformers.

Importing transformers takes seconds, so it is imported only where there is no tokenizer.json.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...architecture.checkpoint_json import read_json
from ...errors import CheckpointError
from .tokenizer import Tokenizer, tokenizer_errors

_OTHERS = ("tokenizer.model", "vocab.json")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer in a folder. Raises CheckpointError."""
    file = folder / "tokenizer.json"
    if not file.exists() and not any((folder / name).exists() for name in _OTHERS):
        raise CheckpointError(f"{folder} has no tokenizer.json", "copy the model's tokenizer files there too")
    with tokenizer_errors(f"the tokenizer in {folder} cannot be read"):
        return _load(folder, file) if file.exists() else Tokenizer.from_transformers(load_hf_tokenizer(folder, {}))


def load_hf_tokenizer(folder: Path, options: Mapping[str, Any]) -> Any:
    """Load transformers' fast tokenizer from a folder. Raises CheckpointError."""
    from transformers import AutoTokenizer

    with tokenizer_errors(f"the tokenizer in {folder} cannot be read"):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
    if not tokenizer.is_fast:
        raise CheckpointError(f"the tokenizer in {folder} has no tokenizer.json", "convert it with transformers first")
    return tokenizer


def _load(folder: Path, file: Path) -> Tokenizer:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

    config, backend = read_json(folder / "tokenizer_config.json"), Backend.from_file(str(file))
    added = config.get("added_tokens_decoder") or {}
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens(
        [AddedToken(**each) for _, each in sorted(added.items(), key=_id) if each["content"] not in known]
    )
    named = _named_tokens(read_json(folder / "special_tokens_map.json")) | _named_tokens(config)
    plain = [token for token in named.values() if token not in known or not known[token].special]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in dict.fromkeys(plain)])
    return Tokenizer(backend, _chat_template(folder, config), named, config.get("split_special_tokens") is True)


def _id(item: tuple[str, Any]) -> int:
    return int(item[0])


def _named_tokens(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that a file names; it has each as a text, or with its flags."""
    found = {name: values.get(name) for name in _NAMED}
    return {
        name: value["content"] if isinstance(value, Mapping) else str(value)
        for name, value in found.items()
        if value is not None
    }


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Return the chat template, or several by name; files take precedence."""
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    if files:
        return {name: path.read_text("utf-8") for name, path in files.items()}
    template = config.get("chat_template")
    return {each["name"]: each["template"] for each in template} if isinstance(template, list) else template
