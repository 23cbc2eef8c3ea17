"""Builds a byte-level BPE tokenizer from a GGUF file's metadata, where transformers does not read the file."""

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from ...errors import CheckpointError, UnsupportedModel
from ...short_repr import short_repr, short_text
from .text_pieces import GPT2_PATTERN, LLAMA3_PATTERN, QWEN_PATTERN
from .tokenizer import Tokenizer

Metadata = Callable[[str], Any]  # the value of a key, None for an absent one
_KEY = "tokenizer.ggml."
_DIGIT = r"\p{N}"
# What splits a text before BPE, by the value of tokenizer.ggml.pre; as in the tokenizer.json of the models named so.
_PATTERNS = {
    "gpt-2": (GPT2_PATTERN,),
    "olmo": (GPT2_PATTERN,),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), (_DIGIT, GPT2_PATTERN)),
    **dict.fromkeys(("llama-bpe", "llama3", "smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), (LLAMA3_PATTERN,)),
    "qwen2": (QWEN_PATTERN,),
}
_COMPOSED = ("command-r", "qwen2")  # normalised to Unicode's NFC, which GGUF files do not say
_WHOLE_FIRST = ("llama-bpe", "llama3")  # a word that is in the vocabulary is a token, whatever the merges
_CONTROL, _USER_DEFINED = 3, 4  # token types
_SPECIAL = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "pad_token": "padding_token_id"}


def tokenizer_from_metadata(read: Metadata) -> Tokenizer:
    """Return the tokenizer that a GGUF file describes.

    Raises:
        UnsupportedModel: it is no byte-level BPE, or a text is split before BPE in an unknown way.
        CheckpointError: the metadata are incomplete.
    """
    model, pre = read(f"{_KEY}model"), read(f"{_KEY}pre")
    if model != "gpt2" or pre not in _PATTERNS:
        raise UnsupportedModel(
            f"the GGUF tokenizer {short_text(str(model))} ({short_text(str(pre))}) is not supported",
            f"what runs for this architecture: gpt2 with {', '.join(_PATTERNS)}; or use the model's safetensors",
        )
    tokens, merges = (_strings(read, name) for name in ("tokens", "merges"))
    backend = _backend(tokens, merges, pre)
    _add_tokens(backend, tokens, read(f"{_KEY}token_type"))
    special = {name: tokens[at] for name, key in _SPECIAL.items() if (at := _token(read, key, len(tokens))) is not None}
    if read(f"{_KEY}add_bos_token") is True and "bos_token" in special:
        _begin_with(backend, special["bos_token"])
    template = read("tokenizer.chat_template")
    return Tokenizer(backend, template if isinstance(template, str) else None, special)


def _strings(read: Metadata, name: str) -> list[str]:
    values = read(f"{_KEY}{name}")
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        raise CheckpointError(f"the GGUF file lacks {_KEY}{name}", "fetch or convert the model again")
    return values


def _token(read: Metadata, key: str, count: int) -> int | None:
    """Return a token's id, None for none. Raises CheckpointError."""
    value = read(f"{_KEY}{key}")
    if value is not None and not (type(value) is int and 0 <= value < count):
        raise CheckpointError(f"{_KEY}{key} is {short_repr(value)}, not a token", "fetch or convert the model again")
    return value


def _backend(tokens: list[str], merges: list[str], pre: str) -> Any:
    """Return a `tokenizers.Tokenizer` without added tokens. Raises CheckpointError."""
    pairs = [tuple(merge.split(" ")) for merge in merges]
    try:
        vocabulary = {token: at for at, token in enumerate(tokens)}
        model = models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre in _WHOLE_FIRST)
    except Exception as error:  # tokenizers raises Exception itself
        raise CheckpointError(
            f"the GGUF file's tokenizer is damaged: {short_text(str(error))}", "fetch or convert the model again"
        ) from error
    backend = Backend(model)
    if pre in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _PATTERNS[pre]]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1")
    return backend


def _add_tokens(backend: Any, tokens: list[str], types: Any) -> None:
    """Mark the tokens that are matched in a text as a whole. Raises CheckpointError."""
    if not isinstance(types, list) or len(types) != len(tokens):
        raise CheckpointError(f"the GGUF file lacks {_KEY}token_type", "fetch or convert the model again")
    whole = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    backend.add_tokens(whole)


def _begin_with(backend: Any, token: str) -> None:
    """Put a token in front of every text."""
    name = [(token, backend.token_to_id(token))]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{token}:0 $A:0", pair=f"{token}:0 $A:0 {token}:1 $B:1", special_tokens=name
    )
