"""Models with linear attention: every method, sampling and batch gives plain decoding's tokens, and sessions go on."""

import pytest
import torch

from offload import GenerationConfig, Sampling, Speculation, Tokens
from offload.batching.request import BatchRequest
from offload.engine import Engine
from offload.errors import SettingsError
from offload.kernels.native.ops import NativeOperations
from offload.kernels.ops import TorchOperations
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.weights import load_model
from tests.support.engine import ALL, GREEDY, fresh, run, tokens
from tests.support.models import FAMILY_CASES, ids, make_hf_model
from tests.support.offloading import SmallPages, native_kernel
from tests.support.prompt_cache import engine_on

CPU = torch.device("cpu")
METHODS = [(method, draft) for method, draft in ALL if draft != "none" and method != "ar"]
COUPLED = Sampling(temperature=1, coupled=True)
PROMPT = ids(230)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3.5")
    family, changes = FAMILY_CASES["qwen3.5"]
    make_hf_model(family, **changes).save_pretrained(folder)
    return folder


def load(folder, native=True):
    operations = NativeOperations(native_kernel()) if native and native_kernel() else TorchOperations()
    return load_model(FolderCheckpoint(folder), torch.float32, CPU, lambda *_: None, operations)


@pytest.fixture(scope="module")
def engine(folder):
    model = load(folder)
    return Engine(model, (), 64, model)  # it is its own draft model


@pytest.fixture(scope="module")
def plain(engine):
    return {sampling: tokens(run(engine, PROMPT, 60, sampling=sampling, seed=3)) for sampling in (GREEDY, COUPLED)}


@pytest.mark.daily("lookup-lookup", "retrieval-lookup", "streaming-lookup", "triforce-model")
@pytest.mark.parametrize(("method", "draft"), METHODS)
def test_methods_give_the_tokens_of_plain_decoding(engine, plain, method, draft):
    for sampling, expected in plain.items():
        found = tokens(run(engine, PROMPT, 60, method, draft, sampling, 3, gamma1=2, gamma2=4))
        assert found == expected, sampling


def test_a_session_goes_on_behind_any_common_beginning(engine, plain):
    session = fresh(engine)
    for prompt in (PROMPT, PROMPT, PROMPT + plain[GREEDY][:20], PROMPT[:200] + ids(50, 8), PROMPT[:60], PROMPT):
        found = tokens(run(session, prompt, 40, "lookup"))
        assert found == tokens(run(fresh(engine), prompt, 40))


def test_sequences_of_a_batch_have_states_of_their_own(engine):
    config, methods = GenerationConfig(max_new_tokens=12), ("ar", "retrieval", "lookup", "triforce")
    prompts = {method: ids(40 + 30 * at, seed=at) for at, method in enumerate(methods)}
    requests = [
        BatchRequest(name, some, GREEDY, config, Speculation(name, "model" if name == "triforce" else "lookup"))
        for name, some in prompts.items()
    ]
    found = {name: [] for name in methods}
    for name, event in engine.generate_batch(requests, 4):
        found[name] += event.ids if isinstance(event, Tokens) else ()
    assert found == {name: tokens(run(engine, some, 12, "ar")) for name, some in prompts.items()}


@pytest.mark.parametrize("wanted", [{"tree": "8"}, {"approximate": "h2o", "budget": 512}])
def test_trees_and_approximate_caches_are_refused_by_name(engine, wanted):
    method = "ar" if "approximate" in wanted else "lookup"
    with pytest.raises(SettingsError, match=f"--{next(iter(wanted))}"):
        run(engine, PROMPT, 5, method, **wanted)


@pytest.mark.daily("False-True", "True-False")
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("by_layers", [False, True])
def test_offloaded_keys_and_values_change_nothing(folder, plain, by_layers, native):
    tiers = SmallPages("stream", 0, page_tokens=32, by_layers=by_layers, link_gb_s=1e3)
    operations = NativeOperations(native_kernel()) if native and native_kernel() else TorchOperations()
    offloading = engine_on(folder, None, tiers, operations)
    for method in ("ar", "lookup", "retrieval"):
        assert tokens(run(offloading, PROMPT, 40, method)) == plain[GREEDY][:40]


@pytest.mark.skipif(not native_kernel(), reason="no kernel")
def test_quantised_keys_and_values_are_rolled_back_alike(folder):
    engine = engine_on(folder, None, operations=NativeOperations(native_kernel()), kv="q8")
    expected = tokens(run(engine, PROMPT, 40, "ar"))
    for method in ("lookup", "retrieval"):
        assert tokens(run(engine, PROMPT, 40, method)) == expected


def test_torch_gives_the_same_tokens_with_a_margin(folder, plain):
    engine = Engine(load(folder, native=False), (), 64)
    for method in ("ar", "lookup", "retrieval"):
        assert tokens(run(engine, PROMPT, 60, method)) == plain[GREEDY]
