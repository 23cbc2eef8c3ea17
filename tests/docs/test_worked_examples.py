"""The worked examples of docs/contributing.md: what they show is run, as it stands there."""

from dataclasses import replace

import pytest
import torch

from offload import EngineConfig, GenerationConfig, Speculation, open_model
from offload.architecture.families import FAMILIES
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.formats.tensor_checks import check_tensors
from offload.loading.weights import load_model
from offload.settings.kv_formats import KV_FORMATS, KVFormat
from offload.settings.methods import APPROXIMATIONS, Approximation
from tests.support.engine import GREEDY, tokens
from tests.support.models import id_tensor, ids, make_hf_model
from tests.support.offloading import CPU, native_kernel
from tests.support.paths import ROOT


def examples(heading):
    """Return the Python blocks of a section."""
    section = (ROOT / "docs" / "contributing.md").read_text("utf-8").split(f"### {heading}\n")[1].split("\n#")[0]
    return [block.split("```")[0] for block in section.split("```python\n")[1:]]


@pytest.fixture
def snapkv(tmp_path, monkeypatch):
    """Make SnapKV's file, under another name than in the package, and its row."""
    source, row = examples("A KV cache: SnapKV")
    (tmp_path / "own_snapkv.py").write_text(source, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    new = eval(row.replace("offload.caches.snapkv", "own_snapkv"), {"Approximation": Approximation})
    monkeypatch.setitem(APPROXIMATIONS, new.name, new)
    return new.name


def test_a_new_cache_is_a_file_and_a_row(snapkv, tiny_model_dir):
    engine = open_model(EngineConfig(str(tiny_model_dir), "cpu", "float32", prefill_chunk=64)).load().without_end()

    def answer(prompt, budget=32, mode=snapkv):
        wanted = Speculation(method="ar", approximate=mode, sink=2, window=5, budget=budget, chunk=2)
        return tokens(engine.generate(prompt, GREEDY, GenerationConfig(max_new_tokens=20), wanted))

    prompt = ids(400)
    exact, found = answer(prompt, mode=None), answer(prompt)
    cache = engine.idle_session.full.cache
    assert found != exact
    assert len(cache.keep(0, 400)[0]) == 32 and cache.length == 419
    assert cache.truncate(399) == 0  # the prompt's tokens are gone
    assert answer(prompt, budget=600) == exact  # nothing is evicted
    longer = [*prompt, *found, *ids(30, seed=1)]
    after_the_first = (answer(prompt), answer(longer))[1]
    engine.release()
    assert answer(longer) == after_the_first  # whatever was cached of the conversation


def test_a_new_kv_format_is_a_file_and_a_row(tmp_path, monkeypatch, tiny_model_dir):
    if native_kernel() is None:
        pytest.skip("there is no native kernel here")
    source, row = examples("A KV format: e5m2")
    (tmp_path / "own_e5m2.py").write_text(source, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    format = eval(row.replace("offload.memory.e5m2", "own_e5m2"), {"KVFormat": KVFormat})
    monkeypatch.setitem(KV_FORMATS, format.name, format)

    def answer(kv, **settings):
        engine = open_model(EngineConfig(str(tiny_model_dir), "cpu", kv=kv, prefill_chunk=100)).load().without_end()
        wanted = Speculation(**{"method": "ar", **settings})
        found = tokens(engine.generate(ids(300), GREEDY, GenerationConfig(max_new_tokens=30), wanted))
        return found, engine.idle_session.full.cache.store

    found, store = answer(format.name)
    assert type(store).__name__ == "E5M2Store"
    assert answer(format.name, method="lookup")[0] == found  # speculation changes nothing
    for x in store.read(0, 300):
        is_e5m2 = (x.to(torch.float8_e5m2).to(x.dtype) == x).all(3).all(1).all(0)
        assert is_e5m2.nonzero().squeeze(1).tolist() == list(range(256))
    assert store.groups.memory.nbytes == store.shape.kv_bytes(384, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", ["as stored", "wide"])
def test_a_new_family_is_a_file_and_its_name(tmp_path, monkeypatch, dtype, offset):
    (source,) = examples("A family: Nemotron")
    exec(source, found := {})
    family = found["NEMOTRON"]
    if offset == "wide":  # norms in fp32, which no family with LayerNorm has yet
        family = replace(family, features=lambda values: {"norm_offset": 1.0, "wide_norms": True})
    monkeypatch.setitem(FAMILIES, family.name, family)
    reference = make_hf_model("nemotron", rope_parameters=None, hidden_act="relu2").to(dtype).eval()
    reference.save_pretrained(tmp_path)
    ids = id_tensor(60)
    with torch.inference_mode():
        expected = reference(ids[None], use_cache=False).logits[0].float()
    checkpoint = FolderCheckpoint(tmp_path)
    check_tensors(checkpoint)
    model = load_model(checkpoint, dtype, CPU, lambda done, total: None)
    logits = model.logits(model.forward(ids, model.new_cache(len(ids))))
    limit = 1e-4 if dtype == torch.float32 else 0.1 * expected.std()
    assert (logits - expected).abs().max() < limit
