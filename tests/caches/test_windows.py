"""The ring of layers with a window, against attention with a mask over all keys; rollbacks, trees, interruptions."""

from dataclasses import replace

import pytest
import torch

from offload.architecture.hf_config import shape_from_config
from offload.architecture.rope import Rope, rotate
from offload.kernels.attention import attend_masked
from offload.kernels.native import find_kernel
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.weights import load_model
from offload.memory.tree_attention import tree_of
from offload.memory.window_rings import Windows
from offload.sequence import TokenSequence
from offload.speculation.passes.runner import Runner
from tests.support.models import id_tensor, ids, make_hf_model
from tests.support.offloading import native_kernel

CPU = torch.device("cpu")
WINDOW = 6
CONFIG = {"model_type": "olmo3", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 99}
CONFIG |= {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": WINDOW}
CONFIG |= {"max_position_embeddings": 4096}
CONFIG |= {"layer_types": ["sliding_attention", "full_attention"], "eos_token_id": 2}


class Sequence:
    """A sequence in a small ring, and all of its queries, keys and values."""

    def __init__(self, kernel, room=14, dtype=torch.float32, window=WINDOW, seed=0, **options):
        shape = replace(
            shape_from_config(CONFIG | {"sliding_window": window}, {}).sliding_attention, window_slack=room - window
        )
        self.rope, self.window = Rope(shape, 100, dtype, CPU), window
        self.windows = Windows(shape, self.rope, dtype, CPU, kernel, **options)
        self.length, self._random, self._dtype = 0, torch.Generator().manual_seed(seed), dtype
        self.all = [torch.zeros(0, heads, 16, dtype=dtype) for heads in (4, 2, 2)]

    def run(self, count, parts=1):
        """Run a pass over new tokens, and commit them; return what it gave."""
        return self.run_these([x.to(self._dtype) for x in self._new(count)], parts)

    def _new(self, count):
        return [torch.randn(count, heads, 16, generator=self._random) for heads in (4, 2, 2)]

    def run_these(self, new, parts=1):
        count = len(new[0])
        self.all = [torch.cat((old[: self.length], x)) for old, x in zip(self.all, new, strict=True)]
        self.windows.begin(self.length, count)
        found = [self.windows.attend(0, *some) for some in zip(*(x.chunk(parts) for x in new), strict=True)]
        self.length += count
        return torch.cat(found)

    def expected(self, count):
        """Return attention of the last tokens, by a mask over all keys."""
        q, k, v = self.all
        rows = self.rope.rows(0, self.length)
        at = torch.arange(self.length)
        sees = (at <= at.unsqueeze(1)) & (at > at.unsqueeze(1) - self.window)
        both = rotate(k, rows).transpose(0, 1), v.transpose(0, 1)
        return attend_masked(rotate(q, rows), *both, sees).out[-count:]


def levels():
    """The best level of the native kernel that runs here, and the portable one."""
    best = native_kernel()
    return [] if best is None else list(dict.fromkeys((best.level, "portable")))


@pytest.fixture(params=["torch", *levels()])
def kernel(request):
    return None if request.param == "torch" else find_kernel(request.param)


@pytest.fixture
def sequence(kernel):
    return Sequence(kernel)


def test_a_ring_that_has_grown_in_inference_mode_is_written_to_outside_of_it(kernel):
    grown, other = Sequence(kernel, room=48, lends=True), Sequence(kernel, room=48)
    with torch.inference_mode():
        grown.run(60)
    other.run(32)
    kv = other.windows.dump(16, 32)
    grown.windows.load(16, 32, kv)
    assert torch.equal(grown.windows.dump(16, 32), kv)
    grown.windows.compact(20, [1, 3])


def test_other_layers_attend_to_a_ring_later_in_the_pass(kernel):
    sequence = Sequence(kernel, lends=True)
    for count in (5, 30, 1, 2):
        expected = sequence.run(count)
        q, k, v = (x[-count:].split(7) for x in sequence.all)
        sequence.windows.begin(sequence.length - count, count)
        lent = torch.cat([sequence.windows.attend(0, *some) for some in zip(q, k, v, strict=True)])
        again = torch.cat([sequence.windows.attend(0, some, None, None) for some in q])
        assert torch.equal(again, lent)
        assert torch.equal(lent, expected) or (kernel is None and (lent - expected).abs().max() < 1e-5)


def test_each_token_sees_its_window_whatever_the_passes(sequence):
    for count, parts in ((3, 1), (8, 1), (1, 1), (30, 1), (40, 4), (2, 1), (1, 1), (5, 1)):
        found = sequence.run(count, parts)
        assert torch.allclose(found, sequence.expected(count), atol=1e-5)


@pytest.mark.parametrize(
    ("level", "dtype"),
    [*((level, torch.bfloat16) for level in levels()), *((level, torch.float32) for level in levels()[:1])],
)
def test_a_token_has_the_same_bits_in_every_pass_across_the_kernels_pieces(level, dtype):
    one, other = (Sequence(find_kernel(level), 900, dtype, window=530) for _ in range(2))
    whole = one.run(1100)
    assert (whole.float() - one.expected(1100)).abs().max() < (1e-5 if dtype == torch.float32 else 0.05)
    new = [x.split([500, 511, 1, 80, 1, 1, 6]) for x in one.all]
    assert torch.equal(torch.cat([other.run_these(some) for some in zip(*new, strict=True)]), whole)


@pytest.mark.parametrize(
    ("parents", "path", "passes"),
    [((-1, -1, 0, 1, 3, 2), (1, 3, 4), (4, 6)), ((-1, *[0] * 22), (0, 22), (23,))],
    ids=["in two passes", "larger than the slack"],
)
def test_a_path_of_a_tree_has_the_results_of_a_chain(kernel, sequence, parents, path, passes):
    other = Sequence(kernel)
    for each in (sequence, other):
        each.run(17)
    chain, end = other.run(len(path)), 17 + len(path)
    new, found = [torch.randn(len(parents), heads, 16) for heads in (4, 2, 2)], []
    for x, old in zip(new, other.all, strict=True):
        x[list(path)] = old[17:]
    for first, last in zip((0, *passes), passes, strict=False):
        sequence.windows.begin(17, last - first, tree_of(parents[:last]), first)
        found.append(sequence.windows.attend(0, *(x[first:last] for x in new)))
    rows = torch.cat(found)[list(path)]
    assert torch.equal(rows, chain) if kernel else torch.allclose(rows, chain, atol=1e-5)
    sequence.windows.compact(17, path)
    sequence.all, sequence.length = other.all, end
    assert torch.allclose(sequence.run(4), sequence.expected(4), atol=1e-5)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_hf_model("olmo3", sliding_window=WINDOW, layer_types=CONFIG["layer_types"]).save_pretrained(folder)
    model = load_model(FolderCheckpoint(folder), torch.float32, CPU, lambda done, total: None)
    model.shape = replace(model.shape, window_slack=16 - WINDOW)
    return model


def test_a_rollback_beyond_the_ring_starts_over(model):
    whole = model.forward(id_tensor(40), model.new_cache(64))
    cache = model.new_cache(64)
    model.forward(id_tensor(40), cache)
    assert cache.truncate(34) == 34
    assert torch.allclose(model.forward(id_tensor(40)[34:], cache), whole[34:], atol=1e-4)
    assert cache.truncate(20) == 0 == cache.length
    assert torch.allclose(model.forward(id_tensor(40), cache), whole, atol=1e-4)


@pytest.mark.parametrize("before", [20, 0])
def test_an_interrupted_pass_that_has_overwritten_windows_is_run_again(model, before):
    sequence, runner = TokenSequence(), Runner(model, model.new_cache(64))
    sequence.restart(ids(20))
    list(runner.prefill(sequence, before) if before else ())
    run = model.forward_by_layers(torch.tensor(ids(60, seed=1)[:30]), runner.cache, 10)
    next(run)
    run.close()
    assert runner.cache.length == before and runner.cache.is_intact is not bool(before)
    expected = Runner(model, model.new_cache(64)).rows(sequence)
    assert torch.allclose(runner.rows(sequence), expected, atol=1e-4)
    assert runner.cache.is_intact and runner.num_cached == 20
