"""Experts in host memory, run there or copied as they are chosen: the rows and tokens of a model that is all in one."""

import time
from dataclasses import dataclass

import pytest
import torch

from offload import GenerationConfig, Speculation
from offload.architecture.parameters import WeightBits
from offload.batching.request import BatchRequest
from offload.engine import Engine
from offload.errors import UnsupportedModel
from offload.kernels.native.ops import NativeOperations
from offload.kernels.ops import CudaOperations, TorchOperations
from offload.loading.formats.quantization import QuantizedCheckpoint
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.weights import load_model
from offload.memory.factory import TieredStoreFactory
from offload.memory.link import TransferFailed
from offload.model.experts import route
from offload.planning.placement import place
from offload.planning.request import PlanRequest
from offload.settings.config import METHODS, Placement
from offload.weight_offloading import expert_stream as streams
from offload.weight_offloading.expert_tier import ExpertTier
from offload.weight_offloading.layer_stream import WeightTier
from tests.support.engine import GREEDY, SMALL, run, tokens
from tests.support.models import FAMILY_CASES, id_tensor, ids, make_hf_model
from tests.support.offloading import CPU, PAGE, SmallPages, make_link, native_kernel, random_delays
from tests.support.planning import HARDWARE

LENGTH, LAYERS, EXPERTS, CHOSEN = 60, 4, 8, 3
ONE = 3 * 64 * 32 * 4  # bytes of an expert in fp32: six pages of the system
needs_kernel = pytest.mark.skipif(not native_kernel(), reason="no kernel")
both_ways = pytest.mark.parametrize("way", ["host", "stream", "hybrid"])
ROWS = 9  # of the least pass that copies experts, if they are hybrid


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("moe")
    family, changes = FAMILY_CASES["qwen3-moe"]
    make_hf_model(family, **changes, num_hidden_layers=LAYERS).save_pretrained(path)
    return path


def load(source, way=None, kept=0, link=None, operations=None, dtype=torch.float32, host=None, rows=ROWS):
    """Load a model, all on one device without a `way`, else with the experts of but `kept` layers in host memory."""
    do, tier = operations or TorchOperations(), None
    checkpoint = source if hasattr(source, "tensors") else FolderCheckpoint(source)
    if way is not None:
        link = link or make_link(before=random_delays(3))
        tier = WeightTier(checkpoint.shape.layers, link, ExpertTier(kept, way, link, host or do, rows))
    return load_model(checkpoint, dtype, CPU, lambda done, total: None, do, tier)


def rows_of(model, split, length=LENGTH):
    cache = model.new_cache(length)
    return torch.cat([model.forward(part, cache).clone() for part in id_tensor(length).split(split)])


@pytest.mark.daily("native-7-*", "torch-7-0-*", "torch-60-1-*", "native-1-1-stream")
@both_ways
@pytest.mark.parametrize("kept", [0, 1, 3])
@pytest.mark.parametrize("split", [1, 7, LENGTH])
def test_experts_in_host_memory_give_the_same_rows(folder, operations, way, kept, split):
    whole, model = load(folder, operations=operations), load(folder, way, kept, operations=operations)
    assert torch.equal(rows_of(model, split), rows_of(whole, split))


@needs_kernel
@both_ways
@pytest.mark.parametrize("level", ["q4", "q8"])
def test_quantised_experts_give_the_same_rows(folder, way, level):
    more = {"operations": NativeOperations(native_kernel()), "dtype": torch.bfloat16}
    checkpoint = QuantizedCheckpoint(FolderCheckpoint(folder), level)
    found, expected = (rows_of(load(checkpoint, each, **more), 9) for each in (way, None))
    assert torch.equal(found, expected)


@dataclass
class Away:
    """Engines over one tiny model: in one memory, and with its experts and perhaps its KV in host memory."""

    folder: object
    way: str
    resident: int

    def engine(self, whole=False):
        if whole:
            return Engine(load(self.folder), (), 16)
        link = make_link()
        settings = SmallPages("stream", self.resident, page_tokens=PAGE, experts=self.way, expert_layers=1)
        stores = TieredStoreFactory(TorchOperations(), CPU, settings, link)
        return Engine(load(self.folder, self.way, 1, link), (), 16, stores=stores)


@pytest.mark.daily("4-hybrid", "4-stream")
@both_ways
@pytest.mark.parametrize("resident", [0, LAYERS])
def test_every_method_emits_the_tokens_of_a_model_in_one_memory(folder, way, resident):
    away = Away(folder, way, resident)
    whole, engine, prompt = away.engine(whole=True), away.engine(), ids(90)
    expected = tokens(run(whole, prompt, 24))
    for method in METHODS:
        if method != "naive":  # which needs a draft model
            assert tokens(run(engine, prompt, 24, method)) == expected, method
    assert tokens(run(engine, prompt, 24, "lookup", tree="5")) == expected


@both_ways
def test_sequences_of_a_batch_have_their_tokens(folder, way):
    away, settings = Away(folder, way, LAYERS), Speculation("lookup", **SMALL)
    whole, engine, config = away.engine(whole=True), away.engine(), GenerationConfig(max_new_tokens=20)
    requests = [BatchRequest(key, ids(30 + 11 * key, key), GREEDY, config, settings) for key in range(4)]
    found = {}
    for key, event in engine.generate_batch(requests, 3):
        found.setdefault(key, []).append(event)
    for request in requests:
        expected = tokens(run(whole, request.ids, 20))
        assert tokens(found[request.key]) == expected


def chosen_experts(model, split):
    """Return how many distinct experts each part of a text chooses in each layer, from the model in one memory."""
    found, layers = [], list(model.layers())
    for layer in layers:
        mixed = layer.experts
        object.__setattr__(layer, "experts", _Counting(mixed, found))
    rows_of(model, split)
    return found


class _Counting:
    def __init__(self, experts, found):
        self._experts, self._found = experts, found

    def mixed(self, x, router, activated):
        self._found.append(len(route(self._experts.router.wide(x), CHOSEN, router)[1].unique()))
        return self._experts.mixed(x, router, activated)


def test_only_chosen_experts_are_copied_for_a_few_tokens(folder):
    link = make_link()
    model = load(folder, "stream", link=link)
    rows_of(model, 2)
    assert link.statistics.bytes == sum(chosen_experts(load(folder), 2)) * ONE


def test_passes_of_many_rows_are_copied_and_those_of_few_run_on_the_host(folder):
    link = make_link()
    model, whole = load(folder, "hybrid", link=link), load(folder)
    for rows in (1, ROWS - 1, ROWS, LENGTH):
        before = link.statistics.bytes
        cache, expected = model.new_cache(LENGTH), whole.new_cache(LENGTH)
        assert torch.equal(model.forward(id_tensor(rows), cache), whole.forward(id_tensor(rows), expected))
        assert (link.statistics.bytes > before) is (rows >= ROWS)


@needs_kernel
@pytest.mark.parametrize("level", [None, "q4", "q5", "q8"])
def test_experts_in_the_host_s_layout_are_unpacked_for_the_device(tmp_path, level):
    """Where a device computes with another layout, as a GPU does: the bits of a model with all experts on it."""
    family, changes = FAMILY_CASES["gpt-oss"]  # with biases
    make_hf_model(family, **changes).save_pretrained(tmp_path)
    checkpoint = FolderCheckpoint(tmp_path)
    checkpoint = QuantizedCheckpoint(checkpoint, level) if level else checkpoint
    device, host = CudaOperations(), NativeOperations(native_kernel())
    more = {"operations": device, "dtype": torch.bfloat16}
    whole = load(checkpoint, **more)
    model = load(checkpoint, "hybrid", host=host, **more)
    assert torch.equal(rows_of(model, 20), rows_of(whole, 20))
    hosted = load(checkpoint, "host", host=host, **more)
    assert torch.equal(rows_of(model, ROWS - 1), rows_of(hosted, ROWS - 1))


def test_a_failed_copy_raises_and_the_next_pass_is_right(folder):
    seen, cable = [], ["loose"]

    def fail(pairs):  # also at the retry
        seen.append(pairs)
        if cable and len(seen) >= 8:
            raise OSError("the cable is loose")

    model, whole = load(folder, "stream", link=make_link(before=fail)), load(folder)
    cache = model.new_cache(LENGTH)
    with pytest.raises(TransferFailed, match="the cable is loose"):
        model.forward(id_tensor(5), cache)
    assert cache.length == 0
    cable.clear()
    for _ in range(3):
        assert torch.equal(rows_of(model, 5), rows_of(whole, 5))


def test_a_missing_wait_is_found(folder, monkeypatch):
    link = make_link(before=lambda pairs: time.sleep(0.02))
    monkeypatch.setattr(link, "wait", lambda ticket: None)
    model = load(folder, "stream", link=link)
    assert model.forward(id_tensor(5), model.new_cache(9)).isnan().any()


@needs_kernel
def test_experts_of_a_layer_that_differ_are_not_copied(folder):
    do, link = NativeOperations(native_kernel()), make_link()
    models = [
        load_model(
            QuantizedCheckpoint(FolderCheckpoint(folder), level), torch.bfloat16, CPU, lambda done, total: None, do
        )
        for level in ("q4", "q8")
    ]
    one, other = (next(model.layers()).experts for model in models)
    stream = streams.ExpertStream(link, CPU, streams.ExpertStatistics("stream"))
    object.__setattr__(one, "down", (*one.down[:-1], other.down[-1]))
    with pytest.raises(UnsupportedModel, match="experts that differ"):
        stream.add(one)


@both_ways
@pytest.mark.parametrize("kept", [0, 2])
def test_memory_on_the_device_and_on_the_host_is_as_planned(folder, way, kept):
    model = load(folder, way, kept)
    placement = Placement(experts=way, expert_layers=kept, link_gb_s=5)
    bits = WeightBits.of_dtype(4)
    asked = PlanRequest("tiny", model.shape, 64, HARDWARE["cpu"], placement, Speculation(), 32, 4, weight_bits=bits)
    placed = place(asked)
    assert (placed.experts, placed.away_layers) == (way, LAYERS - kept)
    experts = [layer.experts for layer in model.layers()]
    kept_bytes = sum(
        tensor.nbytes for each in experts for linear in (*each.gate_up, *each.down) for tensor in linear.tensors()
    )
    assert placed.device.parts.get("experts", 0) == kept_bytes == kept * EXPERTS * ONE
    assert placed.host.parts["experts"] == (LAYERS - kept) * EXPERTS * ONE
    away = [each.away for each in experts if each.away is not None]
    if way == "hybrid":  # one copy, of which the host computes, and which is copied
        (row, *_), linear = away[0].streamed.stream._layers[0].rows, away[0].hosted.gate_up[0]
        assert linear.tensors()[0].data_ptr() == row.data_ptr()
        away = [each.streamed for each in away]
    if way == "host":
        linears = [linear for each in away for linear in (*each.gate_up, *each.down)]
        assert sum(tensor.nbytes for linear in linears for tensor in linear.tensors()) == placed.host.parts["experts"]
        return
    stream = away[0].stream
    assert sum(stored.rows.nbytes for stored in stream._layers) == placed.host.parts["experts"]
    whole = place(PlanRequest("tiny", model.shape, 64, HARDWARE["cpu"], Placement(link_gb_s=5), Speculation(), 32, 4))
    staged = placed.device.parts["staging"] - whole.device.parts["staging"]
    assert sum(buffer.nbytes for buffer in stream._ring.buffers) == staged == 2 * EXPERTS * ONE
