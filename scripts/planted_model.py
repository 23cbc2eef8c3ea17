"""Write a model whose answers in `triforce evaluate` are known: random codes for words, with induction planted by hand.

    python scripts/planted_model.py FOLDER [BOOK]

A Llama of two layers. Heads of the first one attend to the token before, the one before that, and so on; a head of the
second one attends to the place whose tokens before are the present ones, and copies what followed there. So with all
keys and values it finds every needle and goes on with every quotation, and it loses what a cache drops. It has a token
for each word of the tasks, and of the book that it is to read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from random import Random

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from offload.evaluation.tasks import TASKS
from offload.evaluation.tasks.words import prose

_PIECES = r" ?[A-Za-z]+|[0-9]|\s|[^A-Za-z0-9\s]"
_HEAD = 256  # dimensions of a head
_THETA = 1e30  # of RoPE: the first pairs turn by position, and those from _STILL on do not turn in 10^5 tokens
_TURNING, _STILL = 12, 28
_BEHIND = 6  # tokens that are compared, and heads of a layer
_CODE = 2 * (_HEAD // 2 - _STILL) // _BEHIND  # dimensions of a word's code
_WIDTH = 288  # 1 that is constant, the codes of a token and of those before it, and the copied one
_SHARPNESS = 20.0  # of attention to a position, in nats a turning pair
_MATCH = 15.0  # nats of attention for each equal token


def write(folder: Path, texts: Iterable[str] = ()) -> None:
    """Write the model and its tokenizer, with the words of the tasks and of `texts`."""
    tokenizer = _tokenizer([*_texts_of_tasks(), *texts])
    _model(len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _texts_of_tasks() -> list[str]:
    found = list(islice(prose(), 2000))
    for task in TASKS.values():
        for seed in range(20):
            planted = task.plant(Random(seed), 0.5)
            found += [piece for _, piece in planted.pieces]
            found += [f"\n\n {planted.question} {planted.start} ", *planted.answers]
    return found


def _tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    split = pre_tokenizers.Split(Regex(_PIECES), "isolated")
    pieces = dict.fromkeys(piece for text in texts for piece, _ in split.pre_tokenize_str(text))
    vocabulary = {piece: index for index, piece in enumerate(["<unk>", *pieces])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = split, decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def _model(vocab: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=_WIDTH,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=_BEHIND,
        num_key_value_heads=_BEHIND,
        head_dim=_HEAD,
        max_position_embeddings=131072,
        rope_theta=_THETA,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    codes = torch.randint(0, 2, (vocab, _CODE), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight[:, 0] = 1
        model.model.embed_tokens.weight[:, _block(0)] = codes
        _attend_to_positions(model.model.layers[0].self_attn)
        _attend_to_matches(model.model.layers[1].self_attn)
        model.lm_head.weight[:, _block(_BEHIND + 1)] = codes
    return model


def _block(number: int) -> slice:
    """Return where the code of the token `number` positions before lies in a row; that of the copied one is last."""
    return slice(1 + number * _CODE, 1 + (number + 1) * _CODE)


def _attend_to_positions(attention: torch.nn.Module) -> None:
    """Let head j attend to the token j + 1 before, and copy its code."""
    scale = (_WIDTH / (1 + _CODE)) ** 0.5  # of RMSNorm: all rows have the same length
    pairs = torch.arange(_TURNING)
    turns = _THETA ** (-2 * pairs / _HEAD)
    size = (_SHARPNESS * _HEAD**0.5) ** 0.5 / scale
    for head in range(_BEHIND):
        first = head * _HEAD
        attention.k_proj.weight[first + pairs, 0] = size
        angles = -turns * (head + 1)
        attention.q_proj.weight[first + pairs, 0] = size * angles.cos()
        attention.q_proj.weight[first + _HEAD // 2 + pairs, 0] = size * angles.sin()
        copied = torch.eye(_CODE) / scale
        attention.v_proj.weight[first : first + _CODE, _block(0)] = copied
        attention.o_proj.weight[_block(head + 1), first : first + _CODE] = torch.eye(_CODE)


def _attend_to_matches(attention: torch.nn.Module) -> None:
    """Let the first head attend to where the tokens before are the present ones, and copy the token there."""
    scale = (_WIDTH / (1 + (1 + _BEHIND) * _CODE)) ** 0.5
    still = torch.tensor([*range(_STILL, _HEAD // 2), *range(_HEAD // 2 + _STILL, _HEAD)])
    size = (_MATCH * _HEAD**0.5 / _CODE) ** 0.5 / scale
    for number in range(_BEHIND):
        rows = still[number * _CODE : (number + 1) * _CODE]
        attention.q_proj.weight[rows, _block(number)] = size * torch.eye(_CODE)
        attention.k_proj.weight[rows, _block(number + 1)] = size * torch.eye(_CODE)
    attention.v_proj.weight[:_CODE, _block(0)] = torch.eye(_CODE)
    attention.o_proj.weight[_block(_BEHIND + 1), :_CODE] = torch.eye(_CODE)


if __name__ == "__main__":
    write(Path(sys.argv[1]), [Path(each).read_text("utf-8") for each in sys.argv[2:]])
