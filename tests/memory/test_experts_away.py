"""Experts in host memory, run there or copied to the device: the rows and tokens of a model that is all in one."""

import pytest
import torch

from offload import GenerationConfig, Speculation
from offload.architecture.layer_spec import LayerSpec
from offload.batching.request import BatchRequest
from offload.engine import Engine
from offload.errors import UnsupportedModel
from offload.events import ExpertsRun
from offload.kernels.native.ops import NativeOperations
from offload.kernels.ops import CudaOperations, TorchOperations
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.weights import load_model
from offload.memory.factory import TieredStoreFactory
from offload.memory.link import TransferFailed
from offload.planning.inputs import PlanInputs
from offload.planning.placement import place
from offload.settings.config import Placement
from offload.weight_offloading import experts as module
from offload.weight_offloading.experts import ExpertStore, ExpertTier
from offload.weight_offloading.layer_stream import WeightTier
from tests.support.engine import GREEDY, SMALL, run, tokens
from tests.support.models import FAMILY_CASES, id_tensor, ids, make_hf_model
from tests.support.offloading import CPU, PAGE, SmallPages, make_link, native_kernel, random_delays
from tests.support.planning import HARDWARE

LENGTH, LAYERS, EXPERTS, CHOSEN = 60, 4, 8, 3
ONE = 3 * 64 * 32 * 4  # bytes of an expert in fp32: six pages of the system
ROWS = 9  # of the least pass that copies experts
needs_kernel = pytest.mark.skipif(not native_kernel(), reason="no kernel")
SPEC = LayerSpec(router="chosen")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("moe")
    family, changes = FAMILY_CASES["qwen3-moe"]
    make_hf_model(family, **changes, num_hidden_layers=LAYERS).save_pretrained(path)
    return path


def load(source, kept=None, link=None, operations=None, dtype=torch.float32, host=None):
    """Load a model, all on one device, or with the experts of but `kept` layers in host memory."""
    do, tier = operations or TorchOperations(), None
    checkpoint = source if hasattr(source, "weights") else FolderCheckpoint(source)
    if kept is not None:
        link = link or make_link(before=random_delays(3))
        tier = WeightTier(checkpoint.shape.layers, link, ExpertTier(kept, link, host or do, ROWS))
    return load_model(checkpoint, dtype, CPU, lambda done, total: None, do, tier)


def rows_of(model, split, length=LENGTH):
    cache = model.new_cache(length)
    return torch.cat([model.forward(part, cache).clone() for part in id_tensor(length).split(split)])


@pytest.mark.parametrize(("kept", "split"), [(0, 1), (0, 4), (0, LENGTH), (1, 20), (3, LENGTH)])
def test_experts_in_host_memory_give_the_same_rows(folder, operations, kept, split):
    """Passes of few rows run there, and those of many are copied."""
    link = make_link(before=random_delays(3))
    whole, model = load(folder, operations=operations), load(folder, kept, link, operations)
    assert torch.equal(rows_of(model, split), rows_of(whole, split))
    assert (link.statistics.bytes > 0) is (split >= ROWS)


@needs_kernel
@pytest.mark.parametrize("case", ["qwen3-moe-mixed", "gpt-oss", "granite-moe", "qwen3-next"])
def test_every_mixture_gives_the_same_rows_in_bf16(tmp_path, case):
    make_hf_model(FAMILY_CASES[case][0], **FAMILY_CASES[case][1]).save_pretrained(tmp_path)
    more = {"operations": NativeOperations(native_kernel()), "dtype": torch.bfloat16}
    whole, model = load(tmp_path, **more), load(tmp_path, 0, **more)
    for split in (ROWS - 1, ROWS):
        assert torch.equal(rows_of(model, split), rows_of(whole, split))


@needs_kernel
@pytest.mark.parametrize("level", [None, "q4", "q8"])
def test_experts_in_the_host_s_layout_are_unpacked_for_the_device(tmp_path, level):
    """Where a device computes with another layout, as a GPU does: the bits of a model with all experts on it."""
    family, changes = FAMILY_CASES["gpt-oss"]  # with biases
    make_hf_model(family, **changes).save_pretrained(tmp_path)
    checkpoint = FolderCheckpoint(tmp_path)
    checkpoint = checkpoint.rounded(level) if level else checkpoint
    device, host = CudaOperations(), NativeOperations(native_kernel())
    whole = load(checkpoint, operations=device, dtype=torch.bfloat16)
    model = load(checkpoint, 0, operations=device, dtype=torch.bfloat16, host=host)
    assert torch.equal(rows_of(model, 20), rows_of(whole, 20))
    torch.testing.assert_close(rows_of(model, 5).float(), rows_of(whole, 5).float(), atol=0.1, rtol=0.1)


def new_engine(folder, resident=None):
    """Make an engine in one memory, or with experts, and the KV of all but `resident` layers, in host memory."""
    if resident is None:
        return Engine(load(folder), (), 16)
    link, settings = make_link(), SmallPages("stream", resident, page_tokens=PAGE, experts="host", expert_layers=1)
    stores = TieredStoreFactory(TorchOperations(), CPU, settings, link)
    return Engine(load(folder, 1, link), (), 16, stores=stores)


@pytest.mark.parametrize("resident", [0, LAYERS])
def test_methods_and_batches_emit_the_tokens_of_a_model_in_one_memory(folder, resident):
    whole, engine = new_engine(folder), new_engine(folder, resident)
    prompt = ids(90)
    expected = tokens(run(whole, prompt, 24))
    for method, changes in (("ar", {}), ("lookup", {"tree": "5"}), ("triforce", {})):
        assert tokens(run(engine, prompt, 24, method, **changes)) == expected, method
    settings, config = Speculation("lookup", **SMALL), GenerationConfig(max_new_tokens=20)
    requests = [BatchRequest(key, ids(30 + 11 * key, key), GREEDY, config, settings) for key in range(4)]
    answers = {}
    for key, event in engine.generate_batch(requests, 3):
        answers.setdefault(key, []).append(event)
    for request in requests:
        assert tokens(answers[request.key]) == tokens(run(whole, request.ids, 20))


def test_statistics_say_what_the_experts_did(folder):
    events = run(new_engine(folder, LAYERS), ids(50), 10)
    last = [event for event in events if isinstance(event, ExpertsRun)][-1]
    decoded = (LAYERS - 1) * len(tokens(events))  # a step each, of a token
    assert last.layers == LAYERS - 1 and last.passes > decoded and last.seconds > 0
    assert CHOSEN * decoded < last.experts <= EXPERTS * last.passes
    assert last.bytes >= decoded * CHOSEN * ONE + (LAYERS - 1) * EXPERTS * ONE


def test_prompts_read_layer_by_layer_copy_each_layer_once_and_do_not_disturb_each_other(folder):
    link = make_link(before=random_delays(5))
    model, whole = load(folder, 1, link), load(folder)
    prompts = [id_tensor(LENGTH, seed) for seed in range(3)]
    caches = [model.new_cache(LENGTH) for _ in prompts]
    list(model.forward_by_layers(prompts[0], caches[0], 20))
    assert link.statistics.bytes == (LAYERS - 1) * EXPERTS * ONE
    passes = [model.forward_by_layers(*each, 20) for each in zip(prompts[1:], caches[1:], strict=True)]
    for _ in range(2):
        for each in passes:
            next(each)
    passes[0].close()
    list(passes[1])
    for index in (0, 2):
        expected = whole.new_cache(LENGTH)
        list(whole.forward_by_layers(prompts[index], expected, 20))
        for found, wanted in zip(caches[index].store.read(0, LENGTH), expected.store.read(0, LENGTH), strict=True):
            assert torch.equal(found, wanted)


def test_a_failed_copy_raises_and_the_next_pass_is_right(folder):
    seen, cable = [], ["loose"]

    def fail(pairs):  # also at the retry
        seen.append(pairs)
        if cable and len(seen) >= 3:
            raise OSError("the cable is loose")

    model, whole = load(folder, 0, make_link(before=fail)), load(folder)
    cache = model.new_cache(LENGTH)
    with pytest.raises(TransferFailed, match="the cable is loose"):
        model.forward(id_tensor(LENGTH), cache)
    assert cache.length == 0
    cable.clear()
    assert torch.equal(rows_of(model, 20), rows_of(whole, 20))


def test_an_interrupted_pass_leaves_no_buffer_taken(folder, monkeypatch):
    model, whole = load(folder, 0), load(folder)
    sums, plain = [], module.weighted_sum

    def interrupted(*args):
        sums.append(args)
        if len(sums) % 3 == 0:
            raise KeyboardInterrupt
        return plain(*args)

    monkeypatch.setattr(module, "weighted_sum", interrupted)
    for _ in range(4):
        with pytest.raises(KeyboardInterrupt):
            rows_of(model, 10)
    monkeypatch.undo()
    assert torch.equal(rows_of(model, 10), rows_of(whole, 10))


@needs_kernel
def test_layers_may_have_other_formats_and_experts_of_a_layer_may_not(folder):
    """As in most GGUF files: some layers' matrices have more bits."""
    do, link = NativeOperations(native_kernel()), make_link()
    layers = []
    for level in ("q4", "q8"):
        checkpoint = FolderCheckpoint(folder).rounded(level)
        model = load_model(checkpoint, torch.bfloat16, CPU, lambda done, total: None, do)
        layers.append(next(model.layers()).experts)
    store = ExpertStore(ExpertTier(0, link, do, 1), CPU, do)
    moved = [store.add(each, do.gated) for each in layers]
    store.allocate()
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.inference_mode():
        for whole, away in zip(layers, moved, strict=True):
            assert torch.equal(away.mixed(x, SPEC, do.gated), whole.mixed(x, SPEC, do.gated))
    object.__setattr__(layers[0], "down", (*layers[0].down[:-1], layers[1].down[-1]))
    with pytest.raises(UnsupportedModel, match="different formats"):
        store.add(layers[0], do.gated)


def test_memory_on_the_device_and_on_the_host_is_as_planned(folder):
    model, link = load(folder, 0), Placement(link_gb_s=5)
    placement = Placement(experts="host", link_gb_s=5)
    placed, whole = (
        place(PlanInputs("tiny", model.shape, 64, HARDWARE["cpu"], each, Speculation(), 32, 4))
        for each in (placement, link)
    )
    assert placed.away_layers == LAYERS
    away = [layer.experts.away for layer in model.layers()]
    rows, linear = away[0].store._layers[0].rows, away[0].hosted[0][0]
    assert linear.tensors()[0].data_ptr() == rows.data_ptr()  # one copy, of which the host computes
    assert sum(layer.rows.nbytes for layer in away[0].store._layers) == placed.host.parts["experts"]
    staged = placed.device.parts["staging"] - whole.device.parts["staging"]
    assert sum(buffer.nbytes for buffer in away[0].store._ring.buffers) == staged == 2 * EXPERTS * ONE
