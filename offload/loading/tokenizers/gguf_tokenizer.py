"""Builds a byte-level BPE tokenizer from a GGUF file's metadata, where transformers does not read the file."""

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from ...errors import UnsupportedModel
from ...short_repr import short_text
from .text_pieces import GPT2_PATTERN, LLAMA3_PATTERN, QWEN_PATTERN
from .tokenizer import Tokenizer, tokenizer_errors

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
    with tokenizer_errors("the GGUF file's tokenizer is damaged"):
        tokens = read(f"{_KEY}tokens")
        backend = _backend(tokens, read(f"{_KEY}merges"), pre)
        whole = [
            AddedToken(token, special=kind == _CONTROL, normalized=False)  # matched in a text as a whole
            for token, kind in zip(tokens, read(f"{_KEY}token_type"), strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
        backend.add_tokens(whole)
        ids = {name: read(f"{_KEY}{key}") for name, key in _SPECIAL.items()}
        special = {name: tokens[token] for name, token in ids.items() if token is not None}
        if read(f"{_KEY}add_bos_token") is True and "bos_token" in special:
            begin = special["bos_token"]
            backend.post_processor = processors.TemplateProcessing(
                single=f"{begin}:0 $A:0", special_tokens=[(begin, backend.token_to_id(begin))]
            )
    template = read("tokenizer.chat_template")
    return Tokenizer(backend, template if isinstance(template, str) else None, special)


def _backend(tokens: list[str], merges: list[str], pre: str) -> Any:
    """Return a `tokenizers.Tokenizer` without added tokens."""
    vocabulary = {token: at for at, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    backend = Backend(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre in _WHOLE_FIRST))
    if pre in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _PATTERNS[pre]]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend
