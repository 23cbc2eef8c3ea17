"""The shares of the ranks: together they are the whole model, and give its logits."""

import math
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from gguf import GGMLQuantizationType

from offload.architecture.hf_config import read_shape
from offload.errors import SettingsError
from offload.kernels.ops import TorchOperations
from offload.loading.formats.checkpoint import Weight
from offload.loading.hub.download import open_checkpoint
from offload.loading.weights import load_model
from offload.parallel import ALONE, split
from offload.sequence import TokenSequence
from offload.speculation.passes.runner import Runner
from offload.weight_offloading.experts import ExpertTier
from offload.weight_offloading.layer_stream import WeightTier
from tests.support.gguf import write_gguf
from tests.support.models import FAMILY_CASES, ids, make_hf_model
from tests.support.offloading import make_link
from tests.support.rank_pool import CPU


@pytest.mark.parametrize("size", [2, 3])
def test_shares_make_up_the_whole(folders, size):
    shape = open_checkpoint(Path(folders["qwen3-uneven"])).shape
    shares = [split(shape, rank, size, vocab=True) for rank in range(size)]
    assert [head for share in shares for head in share.heads] == list(range(shape.heads))
    assert [column for share in shares for column in share.columns] == list(range(shape.intermediate))
    assert [row for share in shares for row in share.vocab[share.rank]] == list(range(shape.vocab))
    for share in shares:
        assert {head // shape.group for head in share.heads} == set(share.kv_heads)
        assert share.shape.group * share.shape.kv_heads == share.shape.heads


def test_more_ranks_than_heads_are_refused(folders):
    shape = open_checkpoint(Path(folders["llama"])).shape
    with pytest.raises(SettingsError) as caught:
        split(shape, 0, 5)
    assert "--tensor-parallel 4" in caught.value.hint


def hidden(group, path, vocab=None):
    """Return the logits of a prompt in two passes, and the fraction of the checkpoint that was read."""
    checkpoint = open_checkpoint(Path(path))
    share = None if group.size == 1 else split(checkpoint.shape, group.rank, group.size, vocab)
    read = []

    class Counted(NamedTuple):
        weight: Weight

        def read(self, part=None):
            read.append((found := self.weight.read(part)).numel())
            return found

        def quantized(self):
            return None

    checkpoint.weights = {name: Counted(weight) for name, weight in checkpoint.weights.items()}
    model = load_model(checkpoint, torch.float32, CPU, lambda *_: None, group=group, share=share)
    runner = Runner(model, model.new_cache(64), 16)
    rows = runner.rows(TokenSequence(ids(40)), ids(8, seed=1))
    return model.logits(rows), sum(read) / sum(math.prod(each.weight.size) for each in checkpoint.weights.values())


def with_experts_away(group, path):
    """Return the logits of two passes with all experts in host memory."""
    checkpoint, link = open_checkpoint(Path(path)), make_link()
    share = None if group.size == 1 else split(checkpoint.shape, group.rank, group.size)
    tier = WeightTier(checkpoint.shape.layers, link, ExpertTier(0, link, TorchOperations()))
    model = load_model(checkpoint, torch.float32, CPU, lambda *_: None, tier=tier, group=group, share=share)
    runner = Runner(model, model.new_cache(64), 16)
    return model.logits(runner.rows(TokenSequence(ids(40)), ids(8, seed=1)))


def test_ranks_share_experts_in_host_memory(rank_pool, tmp_path):
    make_hf_model(FAMILY_CASES["gpt-oss"][0], **FAMILY_CASES["gpt-oss"][1]).save_pretrained(tmp_path)
    expected, found = hidden(ALONE, str(tmp_path))[0], rank_pool.run(with_experts_away, str(tmp_path))
    for logits in found:
        assert torch.equal(logits, found[0])
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def check_logits(rank_pool, path, vocab=None):
    whole, everything = hidden(ALONE, path)
    assert everything == 1
    found = rank_pool.run(hidden, path, vocab)
    for logits, _ in found:
        assert torch.equal(logits, found[0][0]), "ranks differ"
        torch.testing.assert_close(logits, whole, atol=2e-5, rtol=2e-5)
    return [part for _, part in found]


@pytest.mark.parametrize("name", ["llama-biased", "qwen3-uneven", "mqa"])
def test_logits_are_those_of_the_whole_model(rank_pool, folders, name):
    check_logits(rank_pool, folders[name], vocab=False)
    parts = check_logits(rank_pool, folders[name], vocab=True)
    # No rank reads all of it. Norms, and KV heads if there are fewer than ranks, are read by several.
    assert max(parts) < 0.7
    assert sum(parts) < 1.2


@pytest.mark.parametrize("name", ["phi3", "olmo2", "glm4", "starcoder2", "gpt-oss", "granite-moe"])
def test_families_are_sharded(rank_pool, tmp_path, name):
    family, changes = FAMILY_CASES[name]
    make_hf_model(family, **changes).save_pretrained(tmp_path)
    check_logits(rank_pool, str(tmp_path), vocab=True)


@pytest.mark.parametrize(("name", "match"), [("gemma4", "heads of two kinds"), ("qwen3.5", "linear attention")])
def test_heads_of_two_kinds_and_linear_attention_are_not_sharded(tmp_path, name, match):
    family, changes = FAMILY_CASES[name]
    make_hf_model(family, **changes).save_pretrained(tmp_path)
    for shape in (open_checkpoint(tmp_path).shape, read_shape(tmp_path / "config.json")):
        split(shape, 0, 1)
        with pytest.raises(SettingsError, match=match):
            split(shape, 0, 2)


def test_a_gguf_file_is_sharded_as_well(rank_pool, tmp_path):
    write_gguf(tmp_path / "model.gguf", make_hf_model("llama"), GGMLQuantizationType.Q8_0)
    check_logits(rank_pool, str(tmp_path / "model.gguf"), vocab=True)
