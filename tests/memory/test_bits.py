"""On the native kernel no placement changes a bit: tiers against a single store, at every instruction set."""

import pytest
import torch

from offload.kernels.native.ops import NativeOperations
from offload.kernels.native.structs import PIECE
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.weights import load_model
from offload.memory.tree_attention import tree_of
from tests.support.models import id_tensor, make_hf_model
from tests.support.offloading import CPU, SHAPE, make_link, random_delays, settings, tiered_cache

LENGTH, CAPACITY = 2 * PIECE + 77, 3 * PIECE
PLACEMENTS = [("stream", 0, PIECE, LENGTH), ("host", 0, 2 * PIECE, 190), ("hybrid", 1, PIECE, 190)]


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=str)
def model(request, kernel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bits")
    make_hf_model("llama", **SHAPE).save_pretrained(folder)
    operations = NativeOperations(kernel)
    return load_model(FolderCheckpoint(folder), request.param, CPU, lambda done, total: None, operations)


def rows_of(model, cache, chunk):
    """Return rows of a prompt in chunks, of single tokens, and of a draft that is rolled back and replaced."""
    found = [model.forward(part, cache) for part in id_tensor(LENGTH).split(chunk)]
    found += [model.forward(part, cache) for part in id_tensor(3, 1).split(1)]
    model.forward(id_tensor(8, 2), cache)
    cache.truncate(cache.length - 5)
    found.append(model.forward(id_tensor(5, 3), cache))
    return torch.cat(found)


@pytest.fixture(scope="module")
def expected(model):
    return rows_of(model, model.new_cache(CAPACITY), 300)


@pytest.mark.daily("*-torch.bfloat16-stream-*", "*-torch.bfloat16-host-*", "*-torch.float32-hybrid-*")
@pytest.mark.parametrize(("mode", "resident", "page", "chunk"), PLACEMENTS)
def test_tiers_give_the_bits_of_one_store(model, expected, mode, resident, page, chunk):
    cache = tiered_cache(
        model, settings(mode, resident, page_tokens=page), make_link(before=random_delays(1)), CAPACITY
    )
    assert torch.equal(rows_of(model, cache, chunk), expected)


def test_layer_by_layer_prefill_gives_the_same_bits(model, expected):
    """The prefill follows committed tokens that end inside a page."""
    cache = tiered_cache(model, settings("hybrid", page_tokens=PIECE), capacity=CAPACITY)
    first, rest = id_tensor(LENGTH).split([PIECE + 90, LENGTH - PIECE - 90])
    model.forward(first, cache)
    list(model.forward_by_layers(rest, cache, 200))
    found = torch.cat([model.forward(part, cache) for part in id_tensor(3, 1).split(1)])
    assert torch.equal(found, expected[LENGTH : LENGTH + 3])


TREES = [
    ("hybrid", 1, PIECE - 5, (-1, 0, 0, 1, 2, 2, 4, 6, 7, 3, 8)),  # crosses a page's border
    ("stream", 0, 2 * PIECE - 100, (*range(-1, 120), *[120] * 400)),  # has more tokens than a page
]


@pytest.mark.daily("*-torch.bfloat16-*", "*-torch.float32-small")
@pytest.mark.parametrize(("mode", "resident", "length", "parents"), TREES, ids=["small", "large"])
def test_a_tree_has_the_bits_of_its_chains(model, mode, resident, length, parents):
    """Run in two passes."""
    path = tree_of(parents).path_to(len(parents) - 1)
    prompt, ids, first = id_tensor(length), id_tensor(len(parents), 1), len(parents) // 2
    chain = model.new_cache(CAPACITY)
    model.forward(prompt, chain)
    expected = model.forward(ids[path], chain)
    cache = tiered_cache(model, settings(mode, resident, page_tokens=PIECE), capacity=CAPACITY)
    model.forward(prompt, cache)
    parts = (
        model.forward(ids[:first], cache, tree_of(parents[:first])),
        model.forward(ids[first:], cache, tree_of(parents)),
    )
    assert torch.equal(torch.cat(parts)[path], expected)
    cache.commit(path)
    assert torch.equal(model.forward(id_tensor(2, 2), cache), model.forward(id_tensor(2, 2), chain))
