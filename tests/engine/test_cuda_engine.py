"""A whole model on a GPU."""

import pytest
import torch

from offload import EngineConfig, open_model

PROMPT = list(range(5, 45))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_cuda_agrees_with_the_cpu(tiny_model_dir, dtype):
    engine = open_model(EngineConfig(model=str(tiny_model_dir), device="cpu", dtype="float32", prefill_chunk=16)).load()
    on_gpu = open_model(EngineConfig(model=str(tiny_model_dir), device="cuda", dtype=dtype, prefill_chunk=16)).load()
    ids = torch.tensor(PROMPT)
    expected = engine.model.logits(engine.model.forward(ids, engine.model.new_cache(40)))
    cache = on_gpu.model.new_cache(40)
    found = [on_gpu.model.logits(on_gpu.model.forward(part.cuda(), cache)) for part in ids.split(16)]
    assert (torch.cat(found).cpu() - expected).abs().mean() < (1e-4 if dtype == "float32" else 0.1) * expected.std()
