"""What a run allocates on a GPU is what its plan counts: fake tensors of real widths, few layers, 128K tokens."""

from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from offload.architecture.pages import DEQUANTIZED_BYTES
from offload.architecture.weight_formats import rounded_bits
from offload.caches.factory import selected_cache
from offload.kernels import triton
from offload.memory import factory, page_prefill, pages
from offload.memory.factory import TieredStoreFactory
from offload.memory.host_attention import HostAttention, HostResult
from offload.memory.tier_settings import TierSettings
from offload.parallel.shard import split
from offload.planning.inputs import PlanInputs
from offload.planning.placement import place_in_order
from offload.settings.config import Placement, Speculation
from offload.speculation.passes import runner
from offload.speculation.passes.runner import Runner
from offload.speculation.passes.selected_runner import SelectedRunner
from offload.weight_offloading import layer_stream as weights
from tests.support.fake_cuda import GPU, FakeLink, fake_cuda
from tests.support.fake_models import SHAPES, fake_shape, load_fake
from tests.support.planning import HARDWARE

LAYERS, CHUNK, LONG = 2, 2048, 128 * 1024
SHORT = 6 * 1024  # tokens where pages are read one by one, which takes fake tensors long
SPECULATION = Speculation(method="retrieval", budget=4096)
MIB = 2**20
_ATEN = torch.ops.aten


class WorstCase(TorchFunctionMode):
    """Takes every condition as true, where fake tensors have no values: all chunks of a selection are new."""

    def __torch_function__(self, function, classes, args=(), kwargs=None):
        if function is Tensor.nonzero:
            one = torch.empty(args[0].numel(), dtype=torch.long, device=args[0].device)
            axes = [one, *(torch.empty_like(one) for _ in range(args[0].dim() - 1))]
            return tuple(axes) if kwargs else torch.stack(axes, 1)
        if function is torch.equal:
            return True
        if function in (Tensor.__getitem__, Tensor.__setitem__) and getattr(args[1], "dtype", None) == torch.bool:
            return args[0].clone() if function is Tensor.__getitem__ else None
        if function is Tensor.data_ptr:
            return args[0].untyped_storage()._cdata + args[0].storage_offset()
        simple = {Tensor.gather: _ATEN.gather, Tensor.__invert__: _ATEN.bitwise_not}
        return simple.get(function, function)(*args, **(kwargs or {}))


def faked_host_attention(self, pages, q):
    done = Future()
    state = torch.empty((*q.shape[:2], 2 + q.shape[2]), dtype=torch.float32)
    done.set_result(HostResult(len(pages), 1e-3, [], state))
    return done


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch):
    monkeypatch.setattr(triton, "serves", lambda q: q.device == GPU and len(q) <= triton.ROWS)
    monkeypatch.setattr(triton, "serves_quantized", lambda device: device == GPU)
    monkeypatch.setattr(HostAttention, "submit", faked_host_attention)
    monkeypatch.setattr(runner, "graphs_for", lambda model, cache: None)  # fake tensors cannot be recorded
    monkeypatch.setattr(factory, "begin_allocation", lambda size, dtype, device: (torch.empty(size, dtype=dtype), None))
    for module in (weights, page_prefill, pages):
        monkeypatch.setattr(
            module, "allocator", lambda device: lambda size, dtype: torch.empty(size, dtype=dtype), raising=True
        )


@dataclass
class Run:
    """A request, and a run of it on fake tensors: `peak` bytes beside the resident weights, and those `planned`."""

    request: PlanInputs
    order: str = "chunks"
    weight_layers: int | None = None

    def planned(self):
        parts = place_in_order(self.request, self.order == "layers").device.parts
        return sum(size for name, size in parts.items() if name not in ("weights", "CUDA"))

    @contextmanager
    def started(self):
        request = self.request
        shape = split(request.shape, 0, request.hardware.gpus).shape
        resident, mode = request.placement.resident_layers, request.placement.offload
        settings = TierSettings(mode=mode, resident_layers=resident, by_layers=self.order == "layers")
        with ExitStack() as stack:
            self.usage = stack.enter_context(fake_cuda())
            stack.enter_context(WorstCase())
            tier = None if self.weight_layers is None else weights.WeightTier(self.weight_layers, FakeLink())
            self.model = load_fake(shape, tier, self.request.quantize)
            self.weights = self.usage.now
            self._weights = self.usage.now - self._staged_weights(shape)
            self.usage.peak = self.usage.now
            stores = TieredStoreFactory(self.model.operations, GPU, settings, FakeLink(), kv=request.kv)
            store = stores.new_store(shape, request.tokens, torch.bfloat16)
            self.full = Runner(self.model, self.model.new_cache(request.tokens, store=store), request.prefill_chunk)
            self.middle = SelectedRunner(self.full, selected_cache(self.full.cache, request.speculation))
            yield

    def _staged_weights(self, shape):
        return 0 if self.weight_layers is None else 2 * shape.layer_bytes(self.request.bits)

    @property
    def peak(self):
        return self.usage.peak - self._weights

    def prefill(self, tokens):
        """Run a chunk behind a few pages, or all tokens layer by layer."""
        ids = torch.zeros(tokens, dtype=torch.long, device=GPU)
        if self.order == "chunks":
            self.full.cache.length = 3000
            hidden = self.model.forward(ids, self.full.cache)
        else:
            hidden = _last(self.model.forward_by_layers(ids, self.full.cache, self.request.prefill_chunk))
        self.model.logits(hidden[-1:])

    def decode(self):
        """Select for the first time, draft, and verify at the end of the context."""
        cache = self.full.cache
        cache.length = cache._queries.end = self.request.tokens - 100
        cache._queries.count = 1
        with torch.inference_mode():
            self.middle.cache.adopt()
            self.middle.cache.begin(1)
            self.model.logits(self.model.through(self._ids(1), self.middle.cache))
        cache.length = 3000  # streaming fewer pages takes the same memory
        self.model.logits(self.model.forward(self._ids(33), cache))

    def _ids(self, tokens):
        return torch.zeros(tokens, dtype=torch.long, device=GPU)


def _last(generator):
    while True:
        try:
            next(generator)
        except StopIteration as end:
            return end.value


def request(name, resident, mode="stream", tokens=LONG, hardware="rtx-4090"):
    placement = Placement(offload=mode, resident_layers=resident)
    return PlanInputs(name, fake_shape(name, LAYERS), tokens, HARDWARE[hardware], placement, SPECULATION, CHUNK)


def check(run):
    """Check that the plan has room for the run, and does not count much that is not there."""
    planned, peak = run.planned(), run.peak
    assert peak <= planned, f"{peak / MIB:.0f} MiB where {planned / MIB:.0f} are planned"
    assert planned - peak <= max(0.15 * planned, 300 * MIB), f"{peak / MIB:.0f} MiB of {planned / MIB:.0f} planned"


@pytest.mark.daily("2-*")
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("resident", [0, LAYERS])
def test_prefill_in_chunk_order_selection_and_streamed_verification(name, resident):
    run = Run(request(name, resident, tokens=LONG if resident else SHORT))
    with run.started():
        run.prefill(CHUNK)
        run.decode()
        check(run)


@pytest.mark.daily("8B*")
@pytest.mark.parametrize(("name", "tokens"), [("7B", LONG // 2), ("8B", LONG // 16)])
def test_prefill_in_layer_order_and_hybrid_verification(name, tokens):
    run = Run(request(name, 0, "hybrid", tokens), order="layers")
    with run.started():
        run.prefill(tokens)
        run.decode()
        check(run)


def test_streamed_weights():
    asked = request("8B", 0, tokens=SHORT)
    run = Run(asked, weight_layers=1)
    with run.started():
        run.prefill(CHUNK)
        run.decode()
        staged = 2 * asked.shape.layer_parameters * 2
        assert run.peak - staged <= run.planned()


@pytest.mark.daily("8B*")
@pytest.mark.parametrize(("name", "kind", "resident"), [("7B", "q8", LAYERS), ("8B", "q8", 0)])
def test_quantised_keys_and_values(name, kind, resident):
    """Of a chunk of a prompt, a selection and a verification, on the device and streamed."""
    run = Run(replace(request(name, resident, tokens=SHORT), kv=kind))
    with run.started():
        run.prefill(CHUNK)
        run.decode()
        check(run)


def quantized(asked, level):
    return replace(asked, weight_bits=rounded_bits(asked.shape, level), quantize=level)


@pytest.mark.parametrize("level", ["q4", "q6"])
def test_weights_that_stay_quantised(level):
    """Their bytes, and those that are dequantised for a prompt's chunk."""
    plain = request("8B", LAYERS, tokens=SHORT)
    asked = quantized(plain, level)
    run = Run(asked)
    with run.started():
        run.prefill(CHUNK)
        run.decode()
        check(run)
    counted = place_in_order(asked, False).device.parts
    assert run.weights == pytest.approx(counted["weights"], rel=0.001)  # norms are not counted
    unrounded = place_in_order(plain, False).device.parts
    assert counted["activations"] == unrounded["activations"] + DEQUANTIZED_BYTES


@pytest.mark.long
def test_a_selection_at_128k_takes_no_more_than_is_counted_for_it():
    """With short chunks of a prompt, a selection is the moment when most memory is in use."""
    run = Run(replace(request("7B", 0), prefill_chunk=256))
    with run.started():
        run.full.cache.store._mean_keys.commit(LONG)  # as if a prefill had made them
        run.prefill(256)
        before = run.peak
        run.decode()
        assert run.peak > before
        check(run)
