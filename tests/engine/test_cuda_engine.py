"""A whole model on a GPU."""

import pytest
import torch

from offload import EngineConfig, Speculation, open_model
from offload.events import Tokens
from offload.settings.config import GenerationConfig, Sampling
from tests.support.offloading import SmallPages

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
PROMPT = list(range(5, 45))


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_cuda_agrees_with_the_cpu(tiny_model_dir, dtype):
    engine = open_model(EngineConfig(model=str(tiny_model_dir), device="cpu", dtype="float32", prefill_chunk=16)).load()
    on_gpu = open_model(EngineConfig(model=str(tiny_model_dir), device="cuda", dtype=dtype, prefill_chunk=16)).load()
    ids = torch.tensor(PROMPT)
    expected = engine.model.logits(engine.model.forward(ids, engine.model.new_cache(40)))
    cache = on_gpu.model.new_cache(40)
    found = [on_gpu.model.logits(on_gpu.model.forward(part.cuda(), cache)) for part in ids.split(16)]
    assert (torch.cat(found).cpu() - expected).abs().mean() < (1e-4 if dtype == "float32" else 0.1) * expected.std()


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("offload", ["none", "stream", "hybrid"])
@pytest.mark.parametrize("method", ["retrieval", "lookup", "triforce", "auto"])
def test_every_method_gives_the_plain_output_on_a_gpu(tiny_model_dir, draft_model_dir, method, offload):
    config = EngineConfig(model=str(tiny_model_dir), device="cuda", dtype="float32", prefill_chunk=16)
    tiers = None if offload == "none" else SmallPages(offload, resident_layers=1, page_tokens=64)
    settings = Speculation(method, draft=str(draft_model_dir), budget=64, sink=4, window=28)
    engine = open_model(config, speculation=settings).load(tiers=tiers)

    def emitted(speculation):
        events = engine.generate(PROMPT * 6, Sampling(temperature=0), GenerationConfig(max_new_tokens=40), speculation)
        return [token for event in events if isinstance(event, Tokens) for token in event.ids]

    assert emitted(settings) == emitted(Speculation("ar"))
