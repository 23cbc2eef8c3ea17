"""Assistants of Gemma 4: their forward pass against transformers, and what they emit over every cache of the target."""

import json

import pytest
import torch

from offload import GenerationConfig, Sampling, Speculation, Tokens
from offload.architecture.known_models import KNOWN
from offload.batching.request import BatchRequest
from offload.caches.factory import selected_cache
from offload.engine import Engine
from offload.errors import CheckpointError, SettingsError
from offload.loading.drafters import checked_drafter, is_drafter_folder
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.hub.download import draft_dimensions
from offload.sequence import TokenSequence
from offload.speculation.drafters.assistant import AssistantRunner
from offload.speculation.drafters.heads import HeadDrafter
from offload.speculation.passes.runner import Runner
from offload.speculation.passes.selected_runner import SelectedRunner
from offload.speculation.sampling.warp import Sampler
from offload.speculation.trees.tree import DraftedTree, k_ary
from tests.support.assistants import make_assistant, make_target
from tests.support.engine import SMALL, run, tokens
from tests.support.models import ids, make_hf_model
from tests.support.offloading import CPU

STEPS = 3
GREEDY = Sampling(temperature=0)
COUPLED = Sampling(temperature=1, top_k=40, repetition_penalty=1.3, coupled=True)
CASES = {"dense": {}, "centroids": {"centroids": 3}}


@pytest.fixture(scope="module")
def reference():
    return make_target().eval()


@pytest.fixture(scope="module")
def folders(reference, tmp_path_factory):
    found = {}
    for name, changes in CASES.items():
        found[name] = tmp_path_factory.mktemp(name)
        make_assistant(reference, **changes).save_pretrained(found[name])
    return found


def load(folder, target):
    return checked_drafter(folder, target.shape).load(target, target.operations)


@torch.no_grad()
def expected_logits(reference, assistant, prompt, drafted):
    """What transformers' SinglePositionMultiTokenCandidateGenerator computes for some drafted tokens."""
    before = torch.tensor([prompt[:-1]])
    out = reference(before, output_hidden_states=True, return_shared_kv_states=True, use_cache=False)
    hidden, shared, found = out.hidden_states[-1][:, -1:], out.shared_kv_states, []
    for token in [prompt[-1], *drafted]:
        embedded = reference.get_input_embeddings()(torch.tensor([[token]]))
        step = assistant(
            inputs_embeds=torch.cat((embedded, hidden), -1),
            position_ids=torch.tensor([[len(prompt) - 1]]),
            shared_kv_states=shared,
        )
        hidden = step.last_hidden_state
        found.append(step.logits[0, -1])
    return torch.stack(found)


def new_runner(target, head, sequence):
    """Return an assistant's runner, and that of the target, which has read all but the last token of a sequence."""
    full = Runner(target, target.new_cache(400))
    full.keep_rows(1)
    drafting = AssistantRunner(head)
    drafting.use([full])
    last = sequence.tokens[-1]
    sequence.truncate(len(sequence) - 1)
    list(full.prefill(sequence))
    sequence.extend([last])
    return drafting, full


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(reference, target, folders, case):
    """Of a prompt shorter than the window, from which on transformers sees a token more."""
    assistant, prompt, drafted = make_assistant(reference, **CASES[case]), ids(18), ids(STEPS, seed=5)
    expected = expected_logits(reference, assistant, prompt, drafted)
    sequence = TokenSequence(prompt)
    runner, _ = new_runner(target, load(folders[case], target), sequence)
    found = [runner.logits(runner.rows(sequence)).clone()]
    for token in drafted:
        found.append(runner.logits(runner.step(torch.tensor([token]))).clone())
    found = torch.cat(found)
    proposed = found.isfinite()
    assert proposed.all() == (case == "dense")
    torch.testing.assert_close(found[proposed], expected[proposed], rtol=1e-3, atol=1e-3)
    assert found.argmax(-1).tolist() == expected.argmax(-1).tolist()


def test_a_tree_s_rows_are_those_of_its_paths(target, folders):
    head, sequence = load(folders["dense"], target), TokenSequence(ids(60))
    runner, _ = new_runner(target, head, sequence)
    runner.rows(sequence)
    first = runner.step_tree(torch.tensor([5, 6]), (-1, -1))
    found = torch.cat((first, runner.step_tree(torch.tensor([7, 8, 9]), (0, 0, 1))))
    for path, row in (([5], 0), ([6], 1), ([5, 7], 2), ([5, 8], 3), ([6, 9], 4)):
        runner.rows(sequence)
        for token in path:
            rows = runner.step(torch.tensor([token]))
        torch.testing.assert_close(found[row : row + 1], rows, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("accepted", [0, 1])
@pytest.mark.parametrize("tree", [None, DraftedTree(k_ary((2, 2)))], ids=["chain", "tree"])
def test_the_next_draft_is_that_of_a_fresh_run(target, folders, accepted, tree):
    """After a rejected draft, and after one of which a token was accepted; past the window."""
    head, sequence = load(folders["dense"], target), TokenSequence(ids(40))
    runner, full = new_runner(target, head, sequence)
    drafter = HeadDrafter(runner, Sampler(GREEDY, 0, 267, CPU), target.group)
    draft = drafter.propose(sequence, STEPS, tree)
    full.rows(sequence, draft.tokens) if tree is None else full.tree_rows(sequence, draft.tokens, draft.parents)
    sequence.extend([*draft.tokens[:accepted], 266])
    full.settle(sequence)
    found = [runner.rows(sequence).clone(), runner.step(torch.tensor([9]))]
    again = TokenSequence(sequence.tokens)
    fresh, _ = new_runner(target, head, again)
    for rows, expected in zip(found, [fresh.rows(again).clone(), fresh.step(torch.tensor([9]))], strict=True):
        torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-4)


def test_it_reads_the_retrieval_cache_where_keys_and_values_are_offloaded(target, folders, monkeypatch):
    """With all chunks selected, it reads what is in the full cache."""
    head, sequence = load(folders["dense"], target), TokenSequence(ids(60))
    runner, full = new_runner(target, head, sequence)
    expected = runner.rows(sequence).clone()
    middle = SelectedRunner(full, selected_cache(full.cache, Speculation("triforce", "a model", budget=400, chunk=4)))
    monkeypatch.setattr(full.cache.store, "span", 512, raising=False)
    with pytest.raises(SettingsError, match="they are offloaded"):
        runner.check()
    assert not runner.has_rows(sequence)
    runner.use([full, middle])
    runner.check()
    read = []
    monkeypatch.setattr(full.cache, "lend", lambda *_: read.append(1))
    torch.testing.assert_close(runner.rows(sequence), expected, rtol=1e-4, atol=1e-4)
    assert not read and middle.cache.length == len(sequence) - 1
    middle.keep_rows(1)
    middle.rows(sequence, [9])  # a token that the full cache does not have
    sequence.extend([9, 3])
    middle.settle(sequence)
    found = runner.rows(sequence)
    again = TokenSequence(sequence.tokens)
    monkeypatch.undo()
    torch.testing.assert_close(found, new_runner(target, head, again)[0].rows(again), rtol=1e-3, atol=1e-3)


@pytest.fixture(scope="module")
def engines(targets, folders):
    return {name: Engine(target, (), 16, load(folders["centroids"], target)) for name, target in targets.items()}


@pytest.mark.parametrize(
    ("kernel", "method", "tree"),
    [
        ("torch", "naive", "chain"),
        ("torch", "triforce", "chain"),
        ("native", "naive", "k-ary:2x2"),
        ("native", "triforce", "k-ary:2x2"),
        ("native", "auto", "chain"),
    ],
)
def test_text_is_plain_decoding_s(engines, kernel, method, tree):
    engine = engines.get(kernel) or pytest.skip("there is no native kernel here")
    for sampling in (GREEDY, COUPLED):
        expected = tokens(run(Engine(engine.model, (), 16), ids(90), 14, sampling=sampling, seed=3))
        for end in (7, 14):
            assert tokens(run(engine, ids(90), end, method, "model", sampling, 3, tree=tree)) == expected[:end]


def test_folders_are_recognised_and_wrong_ones_refused(reference, targets, folders, tmp_path):
    target = targets["torch"]
    assert is_drafter_folder(folders["dense"])
    config = json.loads((folders["dense"] / "config.json").read_text())
    llama = make_hf_model("llama")
    llama.save_pretrained(tmp_path / "llama")
    assert not is_drafter_folder(tmp_path / "llama")
    assert draft_dimensions(str(folders["dense"]), target.shape).row == target.shape.hidden  # for plans
    with pytest.raises(SettingsError, match="drafts for a Gemma 4, and this target is none"):
        draft_dimensions(str(folders["dense"]), KNOWN["Llama-3.1-8B"])
    with pytest.raises(SettingsError, match="assistant of Gemma 4, and the target is a llama"):
        checked_drafter(folders["dense"], FolderCheckpoint(tmp_path / "llama").shape)
    for changes, message in (
        ({"backbone_hidden_size": 96}, "hidden size of 96"),
        ({"text_config": config["text_config"] | {"vocab_size": 300}}, "vocabulary of 300"),
        ({"text_config": config["text_config"] | {"head_dim": 8}}, "head size of 8"),
        ({"text_config": config["text_config"] | {"num_key_value_heads": 1}}, "KV heads of 1"),
    ):
        wrong = tmp_path / "wrong"
        wrong.mkdir(exist_ok=True)
        (wrong / "config.json").write_text(json.dumps(config | changes))
        (wrong / "model.safetensors").write_bytes((folders["dense"] / "model.safetensors").read_bytes())
        with pytest.raises(SettingsError, match=message):
            checked_drafter(wrong, target.shape)
    (wrong / "config.json").write_text(json.dumps(config | {"use_ordered_embeddings": True, "num_centroids": 3}))
    with pytest.raises(CheckpointError, match=r"lacks the tensor masked_embedding\.centroids"):
        checked_drafter(wrong, target.shape)


def test_sequences_of_a_batch_have_the_text_that_they_have_alone(engines):
    engine = engines.get("native") or pytest.skip("there is no native kernel here")
    config, settings = GenerationConfig(max_new_tokens=10), Speculation("naive", "a model", **SMALL)
    requests = [BatchRequest(seed, ids(40 + seed, seed), GREEDY, config, settings) for seed in range(3)]
    found = {request.key: [] for request in requests}
    for key, event in engine.generate_batch(requests, 3):
        found[key] += event.ids if isinstance(event, Tokens) else ()
    for request in requests:
        assert found[request.key] == tokens(run(Engine(engine.model, (), 16), request.ids, 10))
