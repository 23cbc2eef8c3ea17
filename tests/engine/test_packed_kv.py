"""`--kv packed`: with every method, all tokens and log-probabilities have the bits that they have in bf16."""

import pytest
import torch

from offload import GenerationConfig, Sampling, Speculation, Tokens
from offload.batching.request import BatchRequest
from offload.engine import Engine
from offload.errors import SettingsError
from offload.kernels.native.ops import NativeOperations
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.weights import load_model
from offload.memory.factory import TieredStoreFactory
from offload.memory.packed_store import PackedStore
from offload.settings.config import METHODS
from tests.support.engine import GREEDY, tokens
from tests.support.models import FAMILY_CASES, ids, make_hf_model
from tests.support.offloading import CPU, make_link, native_kernel, settings
from tests.support.prompt_cache import LENGTH, engine_on, said

pytestmark = pytest.mark.xdist_group("native")
PROMPT, NEW = ids(60) * 5, 100  # decoding completes a run


@pytest.fixture(scope="module")
def engine(model_dir):
    """`engine(kv, folder)`: a fresh one, on the native kernel in bf16."""
    if native_kernel() is None:
        pytest.skip("there is no native kernel here")

    def make(kv, folder=model_dir):
        native = NativeOperations(native_kernel())
        model = load_model(FolderCheckpoint(folder), torch.bfloat16, CPU, lambda *_: None, native)
        model.kv = kv
        return Engine(model, (), 64)

    return make


def answer(engine, prompt=PROMPT, method="ar", sampling=GREEDY, **more):
    """Return the tokens of a request, and their log-probabilities."""
    config, sizes = GenerationConfig(max_new_tokens=NEW, seed=1), {"budget": 64, "chunk": 16, "sink": 16} | more
    events = list(engine.generate(prompt, sampling, config, Speculation(method, **sizes), logprobs=3))
    return tokens(events), [x for event in events if isinstance(event, Tokens) for x in event.logprobs]


@pytest.fixture(scope="module")
def expected(engine):
    assert isinstance(engine("packed").model.new_cache(1).store, PackedStore)
    return answer(engine("exact"))


@pytest.mark.parametrize("method", [name for name in METHODS if name != "naive"])
def test_every_method_has_the_bits_of_bf16(engine, expected, method):
    assert answer(engine("packed"), method=method) == expected


@pytest.fixture(scope="module")
def tiered(engine):
    """`tiered(kv, mode)`: an engine whose keys and values lie over tiers in that format."""

    def make(kv, mode):
        plain = engine("exact")
        tiers = settings(mode, page_tokens=128)
        stores = TieredStoreFactory(plain.model.operations, CPU, tiers, make_link(), kv=kv)
        return Engine(plain.model, (), 64, stores=stores)

    return make


@pytest.mark.parametrize(
    ("mode", "more"),
    [("hybrid", {}), ("stream", {"method": "triforce"}), ("stream", {"method": "lookup", "tree": "12"})],
    ids=["host", "levels", "a tree"],
)
def test_packed_over_tiers_has_the_bits_of_bf16(tiered, mode, more):
    own = [answer(tiered(kv, mode), **more) for kv in ("bf16", "packed")]
    assert own[0] == own[1]


OTHERS = {
    "a tree": {"method": "lookup", "tree": "12"},
    "a sample": {"method": "lookup", "sampling": Sampling(temperature=1, coupled=True)},
    "a selection by attention": {"method": "retrieval", "middle": "h2o"},
    "H2O": {"approximate": "h2o", "budget": 200, "sink": 2, "window": 8},
    "StreamingLLM": {"approximate": "streaming-llm", "budget": 200, "sink": 2, "window": 8},
}


@pytest.mark.parametrize("more", OTHERS.values(), ids=OTHERS)
def test_all_else_has_the_bits_of_bf16(engine, more):
    own = [answer(engine(kv), **more) for kv in ("exact", "packed")]
    assert own[0] == own[1]


DRAFTS = {
    "chains": {"method": "retrieval"},
    "lookup below it": {"method": "triforce"},
    "auto": {"method": "auto"},
    "a tree": {"method": "retrieval", "draft": "none", "tree": "6"},
    "a sample": {"method": "retrieval", "sampling": Sampling(temperature=1, coupled=True)},
}


@pytest.mark.parametrize("more", DRAFTS.values(), ids=DRAFTS)
def test_drafts_from_plane_a_change_no_bit(engine, expected, more):
    """What is computed with half of the bits stays out of the full cache: the second request goes on from it."""
    own, plain = engine("packed"), expected
    if "sampling" in more:
        plain = answer(engine("exact"), sampling=more["sampling"])
    assert answer(own, middle="plane", **more) == plain
    assert answer(own, middle="plane", **more) == plain


def test_a_request_that_the_format_of_keys_and_values_does_not_serve_is_refused(engine):
    with pytest.raises(SettingsError, match="plane reads packed"):
        answer(engine("exact"), method="retrieval", middle="plane")
    with pytest.raises(SettingsError, match="cannot be used together"):
        answer(engine("packed"), approximate="retrieval", window=8)


def test_the_next_request_goes_on_inside_a_packed_run(engine):
    prompts = [PROMPT, PROMPT[:200] + ids(150, seed=3), PROMPT[:20]]
    both = [[answer(own, prompt, "retrieval") for prompt in prompts] for own in map(engine, ("exact", "packed"))]
    assert both[0] == both[1]


def test_a_batch_has_the_tokens_of_bf16(engine):
    wanted = [(name, ids(100 + 60 * at, seed=at)) for at, name in enumerate(("ar", "retrieval", "lookup"))]
    config, found = GenerationConfig(max_new_tokens=20), []
    for kv in ("exact", "packed"):
        requests = [BatchRequest(name, some, GREEDY, config, Speculation(name)) for name, some in wanted]
        answers = {name: [] for name, _ in wanted}
        for name, event in engine(kv).generate_batch(requests, 3):
            answers[name] += event.ids if isinstance(event, Tokens) else ()
        found.append(answers)
    assert found[0] == found[1]


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_layers_that_have_windows_or_borrow_keys_and_values(engine, tmp_path, family):
    name, changes = FAMILY_CASES[family]
    make_hf_model(name, **changes | {"head_dim": 32}).save_pretrained(tmp_path)
    own = [answer(engine(kv, tmp_path), method="lookup") for kv in ("exact", "packed")]
    assert own[0] == own[1]


@pytest.mark.parametrize("family", [None, "gemma3"])
@pytest.mark.parametrize("kinds", [("exact", "packed"), ("packed", "exact")], ids="-".join)
def test_prompts_on_disk_are_those_of_bf16(model_dir, home, tmp_path, kinds, family):
    """What one format has saved, the other one restores; also layers with windows."""
    if native_kernel() is None:
        pytest.skip("there is no native kernel here")
    folder = model_dir
    if family is not None:
        name, changes = FAMILY_CASES[family]
        make_hf_model(name, **changes | {"head_dim": 32}).save_pretrained(folder := tmp_path / family)
    prompt, native = ids(LENGTH), NativeOperations(native_kernel())
    saving, restoring = (engine_on(folder, home, operations=native, dtype=torch.bfloat16, kv=kv) for kv in kinds)
    first, none = said(saving, prompt)
    assert none == 0 and said(restoring, prompt, "retrieval") == (first, LENGTH // 128 * 128)
