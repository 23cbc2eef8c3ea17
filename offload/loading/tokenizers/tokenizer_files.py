"""Loads a checkpoint's tokenizer files with `tokenizers` alone, configured as transformers' AutoTokenizer would.

Importing transformers takes seconds, so it is imported only for tokenizers that are unusual: without tokenizer.json, of
a class that is not reproduced here, or with options that are rare.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, TriforceError
from ..checkpoint_json import read_json
from .tokenizer import Tokenizer
from .tokenizer_classes import CLASSES, class_of, configure
from .tokenizer_errors import tokenizer_errors

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Options of tokenizer_config.json that change what transformers builds, and that are not reproduced here.
_RARE = ("auto_map", "fast_tokenizer_files", "fix_mistral_regex", "model_specific_special_tokens")


class _Unusual(Exception):
    """Raised for a tokenizer that only transformers can build."""


def load_tokenizer(folder: Path, family: str) -> Tokenizer:
    """Load the tokenizer in a folder, for a model of a family. Raises CheckpointError."""
    if not any((folder / name).exists() for name in _FILES):
        raise CheckpointError(f"{folder} has no tokenizer.json", "copy the model's tokenizer files there too")
    with tokenizer_errors(f"the tokenizer in {folder} cannot be read"):
        try:
            return _load(folder, family)
        except _Unusual:
            return Tokenizer.from_transformers(load_hf_tokenizer(folder, {}))


def load_hf_tokenizer(folder: Path, options: Mapping[str, Any]) -> Any:
    """Load transformers' fast tokenizer from a folder. Raises CheckpointError."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
    except TriforceError:
        raise
    except Exception as error:  # transformers and tokenizers raise many types for a broken file
        raise _unreadable(folder, error) from error
    if not tokenizer.is_fast:
        raise CheckpointError(f"the tokenizer in {folder} has no tokenizer.json", "convert it with transformers first")
    return tokenizer


def _unreadable(folder: Path, error: Exception) -> CheckpointError:
    reason = (str(error).splitlines() or [repr(error)])[0]
    return CheckpointError(f"the tokenizer in {folder} cannot be read: {reason}", "fetch the model again")


def _load(folder: Path, family: str) -> Tokenizer:
    """Load a tokenizer without transformers. Raises _Unusual, CheckpointError."""
    import tokenizers

    config = read_json(folder / "tokenizer_config.json")
    if not (folder / "tokenizer.json").is_file() or any(config.get(name) for name in _RARE):
        raise _Unusual
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    kind = class_of(family, _class_name(folder, config), folder / "tokenizer.json")
    if kind not in CLASSES or type(config.get("split_special_tokens", False)) is not bool:
        raise _Unusual
    added = _added_tokens(folder, config, backend)
    if CLASSES[kind].pipeline:  # transformers then builds a new backend, with the added tokens of both files
        found = {token: repr(value) for token, value in backend.get_added_tokens_decoder().items()}
        if {token: repr(value) for token, value in added.items()} != found or not _appended(backend, added):
            raise _Unusual
        if not configure(backend, kind, config, added):
            raise _Unusual
    named = _named_tokens(CLASSES[kind].special_tokens | _special_tokens_map(folder, config), added)
    _add_tokens(backend, added, named, _extra_tokens(config))
    if backend.post_processor is None:
        backend.post_processor = tokenizers.processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1")
    strings = {name: str(token) for name, token in named.items()}
    return Tokenizer(backend, _chat_template(folder, config), strings, config.get("split_special_tokens", False))


def _class_name(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the class that the files name. Raises _Unusual."""
    name = config.get("tokenizer_class") or read_json(folder / "config.json").get("tokenizer_class")
    if name is not None and not isinstance(name, str):
        raise _Unusual
    return name


def _added_tokens(folder: Path, config: Mapping[str, Any], backend: Any) -> dict[int, Any]:
    """Return the added tokens by id, from tokenizer_config.json or else tokenizer.json. Raises _Unusual."""
    from tokenizers import AddedToken

    if "added_tokens_decoder" not in config:
        if (folder / "added_tokens.json").exists():
            raise _Unusual
        return backend.get_added_tokens_decoder()
    try:
        return {int(token): AddedToken(**values) for token, values in config["added_tokens_decoder"].items()}
    except (AttributeError, TypeError, ValueError):
        raise _Unusual from None


def _appended(backend: Any, added: Mapping[int, Any]) -> bool:
    """Return whether added tokens have the ids that a backend would give them: their own, or those after the rest."""
    vocabulary = backend.get_vocab(with_added_tokens=False)
    new = sorted(token for token, value in added.items() if value.content not in vocabulary)
    size = len(vocabulary)
    return new == list(range(size, size + len(new)))


def _special_tokens_map(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the special tokens that the files name, strings or AddedTokens. Raises _Unusual."""
    from tokenizers import AddedToken

    found = {name: value for name, value in config.items() if name.endswith("_token")}
    if "added_tokens_decoder" not in config:
        for name, value in read_json(folder / "special_tokens_map.json").items():
            if isinstance(value, dict):
                flags = {key: flag for key, flag in value.items() if key not in ("special", "__type")}
                value = AddedToken(**flags, special=True)
            elif name in ("additional_special_tokens", "extra_special_tokens"):
                if value != config.get(name):
                    raise _Unusual
                continue
            found[name] = value
    tokens = {}
    for name, value in found.items():
        if isinstance(value, dict):
            if value.get("__type") != "AddedToken":
                raise _Unusual
            value = AddedToken(**{key: flag for key, flag in value.items() if key != "__type"})
        if name in _NAMED and (value is None or isinstance(value, (str, AddedToken))):
            tokens[name] = value
        elif isinstance(value, (str, AddedToken)) or name in _NAMED:
            raise _Unusual  # a token of this model alone, such as that of images
    return tokens


def _named_tokens(tokens: Mapping[str, Any], added: Mapping[int, Any]) -> dict[str, Any]:
    """Return the special tokens in transformers' order, with the flags of the added tokens of the same content."""
    by_content = {token.content: token for token in added.values()}
    return {name: by_content.get(str(token), token) for name in _NAMED if (token := tokens.get(name)) is not None}


def _extra_tokens(config: Mapping[str, Any]) -> list[str]:
    """Return the special tokens without a name. Raises _Unusual."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if not isinstance(extra, list) or not all(isinstance(token, str) for token in extra):
        raise _Unusual
    return extra


def _add_tokens(backend: Any, added: Mapping[int, Any], named: Mapping[str, Any], extra: list[str]) -> None:
    """Add the special tokens that tokenizer.json lacks, in transformers' order: it decides their ids."""
    from tokenizers import AddedToken

    tokens = [added[token] for token in sorted(added)]
    known = {token.content for token in (*tokens, *backend.get_added_tokens_decoder().values())}
    for token in (*named.values(), *extra):
        if str(token) not in known:
            known.add(str(token))
            tokens.append(AddedToken(token, special=True) if isinstance(token, str) else token)
    names = {str(token) for token in named.values()}
    for token in tokens:
        token.special = token.special or token.content in names
    backend.add_tokens(tokens)


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Return the chat template, or several by name. Files take precedence. Raises _Unusual, CheckpointError."""
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    if files:
        try:
            templates = {name: path.read_text("utf-8") for name, path in files.items()}
        except (OSError, ValueError) as error:
            raise _unreadable(folder, error) from error
        return templates["default"] if set(templates) == {"default"} else templates
    template = config.get("chat_template")
    if isinstance(template, list):
        try:
            return {each["name"]: each["template"] for each in template}
        except (KeyError, TypeError):
            raise _Unusual from None
    if template is not None and not isinstance(template, str):
        raise _Unusual
    return template
