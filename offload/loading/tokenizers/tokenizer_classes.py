"""The classes of transformers that build tokenizers, as settings of a `tokenizers.Tokenizer`.

transformers' generic class uses tokenizer.json as it is. Others take vocabulary and merges from it and configure the
rest themselves, whatever the file says; that is reproduced here for the common ones.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...architecture.families import FAMILIES
from ...architecture.families.family import GENERIC_TOKENIZER

_GENERIC_NAMES = (GENERIC_TOKENIZER, "PreTrainedTokenizer", "PythonBackend")
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_PATTERN = QWEN_PATTERN.replace(r"\p{N}|", r"\p{N}{1,3}|")
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class TokenizerClass:
    """How a class configures a tokenizer.

    Attributes:
        pipeline: returns the normalizer, pre-tokenizer and decoder for tokenizer_config.json, and only vocabulary and
            merges are the file's; None for all of its own.
        model: settings of the BPE model.
        special_tokens: those that tokenizer_config.json may leave out.
    """

    pipeline: Callable[[Mapping[str, Any]], tuple[Any, Any, Any]] | None
    model: Mapping[str, Any]
    special_tokens: dict[str, str]


def _llama(config: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    from tokenizers import decoders, pre_tokenizers

    prefix = config.get("add_prefix_space")
    prefix = True if prefix is None else bool(prefix)
    scheme = "never" if not prefix else "always" if config.get("legacy", False) else "first"
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    steps += [decoders.Strip(content=" ", left=1)] if prefix else []
    return (
        None,
        pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False),
        decoders.Sequence(steps),
    )


def _qwen2(config: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    split = pre_tokenizers.Split(Regex(QWEN_PATTERN), behavior="isolated", invert=False)
    prefix = bool(config.get("add_prefix_space"))
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
    return normalizers.NFC(), pre_tokenizers.Sequence([split, bytes_]), decoders.ByteLevel()


def _gpt2(config: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    from tokenizers import decoders, pre_tokenizers

    prefix = bool(config.get("add_prefix_space"))
    return None, pre_tokenizers.ByteLevel(add_prefix_space=prefix), decoders.ByteLevel()


_PLAIN = {"dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
_AFFIXES = {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
_NO_AFFIXES = dict.fromkeys(_AFFIXES)
_END = "<|endoftext|>"
CLASSES = {
    GENERIC_TOKENIZER: TokenizerClass(None, {}, {}),
    "LlamaTokenizer": TokenizerClass(
        _llama,
        _PLAIN | _NO_AFFIXES | {"fuse_unk": True, "byte_fallback": True},
        {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    ),
    "Qwen2Tokenizer": TokenizerClass(
        _qwen2, _PLAIN | _AFFIXES, {"unk_token": _END, "eos_token": _END, "pad_token": _END}
    ),
    "GPT2Tokenizer": TokenizerClass(
        _gpt2, _PLAIN | _AFFIXES, {"unk_token": _END, "bos_token": _END, "eos_token": _END}
    ),
}


def class_of(family: str, named: str | None, file: Path) -> str:
    """Return the class that AutoTokenizer takes for a family, the class that a checkpoint names, and tokenizer.json."""
    name = (named or "").removesuffix("Fast")
    known = FAMILIES.get(family)
    if known is not None and known.tokenizer:
        return known.tokenizer
    if not name:
        return GENERIC_TOKENIZER if known is None else known.unnamed_tokenizer
    if name in _GENERIC_NAMES or (name == "LlamaTokenizer" and _is_byte_level(file)):
        return GENERIC_TOKENIZER
    return name


def _is_byte_level(file: Path) -> bool:
    """Return whether a tokenizer works on bytes, as Llama 3's does, and not on SentencePiece's pieces."""
    return '"ByteLevel"' in file.read_text("utf-8")


def configure(backend: Any, name: str, config: Mapping[str, Any], added: Mapping[int, Any]) -> bool:
    """Configure a backend as a class does; return False, without a change, where that is not possible."""
    from tokenizers import models

    kind = CLASSES[name]
    if not isinstance(backend.model, models.BPE):
        return False
    normalizer, pre_tokenizer, decoder = kind.pipeline(config)
    if repr(normalizer) != repr(backend.normalizer) and any(token.normalized for token in added.values()):
        return False  # their normalised forms were computed when the file was read
    backend.normalizer, backend.pre_tokenizer, backend.decoder = normalizer, pre_tokenizer, decoder
    for setting, value in kind.model.items():
        setattr(backend.model, setting, value)
    return True
