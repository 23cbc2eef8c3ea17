"""Builds the tokenizer that a GGUF file describes: byte-level BPE (`gpt2`) and SentencePiece's BPE (`llama`).

Ids, tokens, merges, scores and types are the file's own. An absent key has the default of the format, as in llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import PromptError, UnsupportedModel
from ...short_repr import short_text
from .chat_template import ASSISTANT, USER, ChatTemplate
from .text_pieces import GPT2_PATTERN, LLAMA3_PATTERN, QWEN_PATTERN
from .tokenizer import Tokenizer, tokenizer_errors

if TYPE_CHECKING:
    import tokenizers

Metadata = Callable[[str], Any]  # the value of a key, None for an absent one
_KEY = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # types of tokens
_SPECIAL = {  # by transformers' names: those of the format, and the default of SentencePiece's vocabularies
    "bos_token": ("bos_token_id", 1),
    "eos_token": ("eos_token_id", 2),
    "unk_token": ("unknown_token_id", 0),
    "pad_token": ("padding_token_id", None),
}
_NOT_SET = 2**32 - 1
# Control tokens that end a turn, or a text, in every vocabulary that has them (llama.cpp's list).
END_OF_TURN = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>",
    "<EOT>", "_<EOT>", "<｜end▁of▁sentence｜>", "<end_of_utterance>", "<|return|>", "<|call|>", "<|END_OF_TURN_TOKEN|>",
}  # fmt: skip
_HARMONY = ("<|return|>", "<|call|>")  # where these are, <|end|> ends a message and no turn

# The patterns that split a text before BPE, one after the other, as in the tokenizer.json of the models named so.
_DIGIT, _DIGITS_OF_3 = r"\p{N}", r"\p{N}{1,3}"
_CASED = (  # words by their case: upper, then lower
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+SUFFIX|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*SUFFIX|"
    r"DIGITS| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = _CASED.replace("SUFFIX", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?").replace("DIGITS", _DIGITS_OF_3)
_TEKKEN = _CASED.replace("SUFFIX", "").replace("DIGITS", _DIGIT)
_QWEN35 = QWEN_PATTERN.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]+[", r"[^\s\p{L}\p{M}\p{N}]+[")
_PUNCTUATED = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CJK, _HAN = "[一-龥\u3040-ゟ゠-ヿ]+", "[一-龥ࠀ-一가-\ud7ff]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\x{1f7d}ᾀ-ᾴᾶ-ᾼ\x{1fbe}"
    r"ῂ-ῄῆ-ῌῐ-\x{1fd3}ῖ-\x{1fdb}ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\x{2126}ℨ\x{212a}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+",
    r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
    r"\s+$",
    _HAN,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, _DIGIT)
_EXAONE_MOE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_NORDIC = r" ?[^(\s|.,!?…。，、।۔،)]+"
_ROWS = (  # patterns, and the values of tokenizer.ggml.pre that have them
    ((r"[\p{P}$+<=>^~|]+", GPT2_PATTERN, r"\p{N}+", "[0-9][0-9][0-9]"), "default"),
    ((GPT2_PATTERN,), "gpt-2 phi-2 olmo mpt jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum modern-bert"),
    ((_DIGIT, GPT2_PATTERN), "smollm starcoder refact command-r codeshell exaone minerva-7b"),
    ((LLAMA3_PATTERN,), "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2"),
    ((LLAMA3_PATTERN,), "smaug-bpe dbrx glm4 chatglm-bpe"),
    ((QWEN_PATTERN,), "qwen2 deepseek-r1-qwen kormo stablelm2 hunyuan solar-open megrez grok-2"),
    ((_QWEN35,), "qwen35"),
    ((_TEKKEN,), "tekken"),
    ((_GPT4O,), "gpt-4o llama4 kanana2 minimax-m2"),
    ((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O), "tiny_aya"),
    ((_DIGITS_OF_3, _CJK, _PUNCTUATED), "deepseek-v3 hunyuan-dense joyai-llm"),
    (_DEEPSEEK_LLM, "deepseek-llm"),
    (_DEEPSEEK_CODER, "deepseek-coder"),
    ((r"[\p{P}$+<=>^~|`]+", GPT2_PATTERN, "[0-9][0-9][0-9]"), "falcon"),
    ((_EXAONE_MOE,), "exaone-moe"),
    ((_SEED,), "seed-coder"),
    ((r"\p{N}+", r"(?=(\d{3})+(?!\d))"), "superbpe"),
    ((_NORDIC,), "poro-chat bloom gpt3-finnish"),
    ((_NORDIC, _DIGIT), "viking"),
)
PATTERNS = {name: patterns for patterns, names in _ROWS for name in names.split()}
_COMPOSED = ("command-r", "qwen2", "qwen35")  # whose texts are in Unicode's NFC
# A word that is in the vocabulary is one token, whatever the merges; raw texts of these begin with BOS by default.
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
_SPACE = "▁"


def end_of_turn_ids(read: Metadata) -> list[int]:
    """Return the ids of the tokens that end a turn: by their well-known names, or in the chat template."""
    tokens = read(f"{_KEY}tokens")
    if tokens is None:
        return []
    types = _types(read, tokens)
    is_harmony = set(_HARMONY) <= set(tokens)
    names = END_OF_TURN - {"<|end|>"} if is_harmony else END_OF_TURN
    control = [at for at, kind in enumerate(types[: len(tokens)]) if kind in (_CONTROL, _USER_DEFINED)]
    after = "" if is_harmony else _after_an_answer(read, tokens)
    written = max((tokens[at] for at in control if after.startswith(tokens[at])), key=len, default=None)
    return [at for at in control if tokens[at] in names or tokens[at] == written]


def _after_an_answer(read: Metadata, tokens: Sequence[str]) -> str:
    """Return what the chat template writes after an assistant's message; "" without one that can be rendered."""
    template, answer = read("tokenizer.chat_template"), "an answer of the assistant"
    if not isinstance(template, str):
        return ""
    try:
        messages = [{"role": USER, "content": "a"}, {"role": ASSISTANT, "content": answer}]
        text = ChatTemplate(template, _special_tokens(read, tokens)).render(messages)
    except (PromptError, LookupError, TypeError):  # as for damaged metadata, which the tokenizer reports
        return ""
    return text.rpartition(answer)[2].lstrip() if answer in text else ""


def _types(read: Metadata, tokens: Sequence[str]) -> list[int]:
    """Return the types of tokens; those that end a turn are control tokens even where a file calls them text."""
    types = read(f"{_KEY}token_type")
    types = [_NORMAL] * len(tokens) if types is None else types
    pairs = zip(tokens, types, strict=False)
    return [_CONTROL if token in END_OF_TURN and kind != _USER_DEFINED else kind for token, kind in pairs]


def special_ids(read: Metadata) -> dict[str, int]:
    """Return the ids of special tokens by transformers' names."""
    is_sentencepiece, found = read(f"{_KEY}model") == "llama", dict[str, int]()
    for name, (key, default) in _SPECIAL.items():
        number = read(f"{_KEY}{key}")
        if number in (None, _NOT_SET):
            number = default if is_sentencepiece else None
        if number is not None:
            found[name] = number
    return found


def _special_tokens(read: Metadata, tokens: Sequence[str]) -> dict[str, str]:
    return {name: tokens[token] for name, token in special_ids(read).items()}


def tokenizer_from_metadata(read: Metadata) -> Tokenizer:
    """Return the tokenizer of a file whose metadata `read` returns.

    Raises:
        UnsupportedModel: the kind of tokenizer, or the way to split a text before BPE, is not known.
        CheckpointError: the metadata are incomplete or damaged.
    """
    from tokenizers import AddedToken, processors

    model, pre = read(f"{_KEY}model"), read(f"{_KEY}pre") or "default"
    if model not in ("gpt2", "llama") or (model == "gpt2" and pre not in PATTERNS):
        raise UnsupportedModel(
            f"the GGUF tokenizer {short_text(str(model))} ({short_text(str(pre))}) is not supported",
            f"use the model's safetensors; known are llama, and gpt2 with {', '.join(sorted(PATTERNS))}",
        )
    with tokenizer_errors("the GGUF file's tokenizer is damaged"):
        tokens = read(f"{_KEY}tokens")
        types = _types(read, tokens)
        backend = _sentencepiece(read, tokens, types) if model == "llama" else _byte_level(read, tokens, pre)
        whole = (_CONTROL, _USER_DEFINED, _UNKNOWN) if model == "llama" else (_CONTROL, _USER_DEFINED)
        added = [  # matched in a text as a whole
            AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in whole
        ]
        backend.add_tokens(added)
        special = _special_tokens(read, tokens)
        begins = read(f"{_KEY}add_bos_token")
        begins = (model == "llama" or pre in _WHOLE_WORDS) if begins is None else begins
        begin = special.get("bos_token") if begins else None
        end = special.get("eos_token") if read(f"{_KEY}add_eos_token") else None
        if begin or end:
            backend.post_processor = processors.TemplateProcessing(
                single=[*([begin] if begin else []), "$A", *([end] if end else [])],
                special_tokens=[(token, tokens.index(token)) for token in (begin, end) if token],
            )
    templates = {name: read(f"tokenizer.chat_template.{name}") for name in read("tokenizer.chat_templates") or ()}
    templates["default"] = read("tokenizer.chat_template") or templates.get("default")
    return Tokenizer(backend, {name: each for name, each in templates.items() if isinstance(each, str)}, special)


def _byte_level(read: Metadata, tokens: list[str], pre: str) -> tokenizers.Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocabulary = dict(zip(tokens, range(len(tokens)), strict=True))
    merges = [_pair(merge) for merge in read(f"{_KEY}merges")]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _WHOLE_WORDS))
    if pre in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in PATTERNS[pre]]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _pair(merge: str) -> tuple[str, str]:
    blank = merge.index(" ", 1)  # a token may begin with one
    return merge[:blank], merge[blank + 1 :]


def _sentencepiece(read: Metadata, tokens: list[str], types: Sequence[int]) -> tokenizers.Tokenizer:
    """Return SentencePiece's BPE: a pair is merged the earlier, the higher the score of its token is."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = dict(zip(tokens, range(len(tokens)), strict=True))
    scores = read(f"{_KEY}scores")
    scores = [0.0] * len(tokens) if scores is None else list(scores)
    pieces = [token for token, kind in zip(tokens, types, strict=True) if kind in (_NORMAL, _USER_DEFINED)]
    model = models.BPE(
        vocab=vocabulary,
        merges=list(_merges(pieces, vocabulary, scores)),
        unk_token=tokens[special_ids(read)["unk_token"]],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    has_prefix = read(f"{_KEY}add_space_prefix") is not False
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if has_prefix else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if has_prefix else [])])
    return backend


def _merges(pieces: list[str], vocabulary: dict[str, int], scores: list[float]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of tokens that make up the `pieces`, the piece with the highest score first.

    Where scores are equal, the longest left part comes first, then the longest right one, as in transformers.
    """
    found = []
    for piece in pieces:
        number, size = vocabulary[piece], len(piece)
        pairs = [at for at in range(1, size) if piece[:at] in vocabulary and piece[at:] in vocabulary]
        found += [(-scores[number], -at, at - size, number, piece) for at in pairs]
    found.sort()
    for _, negative_cut, _, _, piece in found:
        yield piece[:-negative_cut], piece[-negative_cut:]
