"""Quantised copies of a loaded model, against models loaded from the same rounded weights."""

import pytest
import torch

from offload.loading.formats.quantization import QuantizedCheckpoint
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.quantized_copy import QuantizedCopies
from offload.loading.weights import load_model
from offload.planning.self_draft import bits_at, copy_bytes
from offload.settings.config import QUANTIZE
from tests.support.models import ids, make_hf_model
from tests.support.native_kernel import distance

PROMPT = ids(300)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def checkpoint(request, tmp_path_factory):
    """A model whose attention has rows that 6-bit blocks do not fit."""
    folder = tmp_path_factory.mktemp("model")
    make_hf_model("llama", tie_word_embeddings=request.param, intermediate_size=256).save_pretrained(folder)
    return FolderCheckpoint(folder)


@pytest.fixture
def model(checkpoint, native_operations):
    return load(checkpoint, native_operations)


def load(checkpoint, operations):
    return load_model(checkpoint, torch.bfloat16, torch.device("cpu"), lambda done, total: None, operations)


def logits(model):
    return model.logits(model.forward(torch.tensor(PROMPT[:40]), model.new_cache(40)))


def test_a_copy_computes_with_the_rounded_weights_and_the_models_own_embedding(checkpoint, model):
    copies = QuantizedCopies(model, checkpoint)
    copy = copies.make("q4", PROMPT)
    rounded = logits(load(QuantizedCheckpoint(checkpoint, "q4"), model.operations))
    assert distance(logits(copy.model), rounded) < 0.3 * distance(logits(model), rounded)
    assert copies.make("q4", PROMPT[:9]) is copy
    ids = torch.tensor([7, 3])
    assert torch.equal(copy.model.embedding(ids), model.embedding(ids))


@pytest.mark.parametrize("level", QUANTIZE)
def test_the_plan_counts_the_bytes_that_a_copy_takes(checkpoint, model, level):
    copy = QuantizedCopies(model, checkpoint).make(level, PROMPT[:8]).model
    assert copy.read_cost == pytest.approx(copy_bytes(model.shape, bits_at(model.shape, level)), rel=0.03)
    assert copy.read_cost < 0.6 * model.read_cost


def test_finer_levels_agree_more_and_a_sample_of_layers_estimates_how_much(checkpoint, model):
    copies = QuantizedCopies(model, checkpoint)
    agreements = [copies.make(level, PROMPT).agreement for level in ("q4", "q5", "q8")]
    assert agreements == sorted(agreements)
    assert 0.3 < agreements[0] < agreements[2] < 1
    assert copies.changed_by_q4(PROMPT) == pytest.approx(1 - agreements[0], rel=0.3)
