"""Trained heads: their forward passes against plain torch, their caches after rejections, and what they emit."""

import pytest
import torch

from offload import EngineConfig, GenerationConfig
from offload.api.loader import open_model
from offload.architecture.head_shape import drafter_bits
from offload.engine import Engine
from offload.errors import CheckpointError, SettingsError, UnsupportedModel
from offload.kernels.ops import TorchOperations
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.heads import checked_drafter
from offload.loading.weights import load_model
from offload.parallel import ALONE
from offload.sequence import TokenSequence
from offload.settings.config import Sampling, Speculation
from offload.speculation.drafters.model_drafter import HeadDrafter
from offload.speculation.passes.head_runner import HeadRunner
from offload.speculation.passes.runner import Runner
from offload.speculation.sampling.warp import Sampler
from offload.speculation.trees.tree import DraftedTree, k_ary
from tests.support.engine import run, tokens
from tests.support.heads import LAYERS, VOCAB, Eagle3Reference, add_mtp, save_eagle3
from tests.support.models import FAMILY_CASES, ids, make_hf_model
from tests.support.offloading import CPU, native_kernel
from tests.support.table_models import chi_square_p

SETTINGS = Speculation("naive", "a head", window=200)  # for all slots of these tests
GREEDY = Sampling(temperature=0)
CASES = {
    "plain": {},
    "all-tokens": {"vocab": VOCAB},
    "normed-output": {"norm_output": True, "norm_before_residual": True},
    "speculators": {"is_speculators": True, "norm_before_fc": True},
    "two-layers": {"is_speculators": True, "layers": 2, "norm_before_residual": False, "fc_norm": True},
    "qwen3": {"is_speculators": True, "model_type": "qwen3", "taps": (1, 4)},
}


@pytest.fixture(scope="module")
def reference():
    return make_hf_model("llama", num_hidden_layers=LAYERS, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def target(reference, tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    reference.save_pretrained(folder)
    return load_model(FolderCheckpoint(folder), torch.float32, CPU, lambda done, total: None)


def head_of(target, folder, operations=None):
    head = checked_drafter(folder, target.shape).load(target, operations or TorchOperations())
    target.tap(head.own.taps)
    return head


def new_runner(target, head, settings=SETTINGS, sequence=None):
    """Return a head's runner, and that of the target, which has read all but the last token of a sequence."""
    full = Runner(target, target.new_cache(400))
    drafting = HeadRunner(head, settings, [full])
    full.keep_rows(drafting.reach)
    if sequence is not None:
        last = sequence.tokens[-1]
        sequence.truncate(len(sequence) - 1)
        list(full.prefill(sequence))
        sequence.extend([last])
    return drafting, full


@pytest.mark.parametrize("is_native", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_chains_have_the_rows_of_plain_torch(target, reference, tmp_path, case, is_native):
    from offload.kernels.native.ops import NativeOperations

    if is_native and native_kernel() is None:
        pytest.skip("there is no native kernel")
    folder = save_eagle3(tmp_path / "head", **CASES[case])
    head = head_of(target, folder, NativeOperations(native_kernel()) if is_native else None)
    expected = Eagle3Reference(folder, reference.model.embed_tokens.weight.detach())
    sequence, drafted = TokenSequence(ids(30)), ids(3, seed=1)
    runner, _ = new_runner(target, head, sequence=sequence)
    with torch.no_grad():
        states = reference(torch.tensor([sequence.tokens]), output_hidden_states=True)
        entering = [x[0] for x in states.hidden_states[:LAYERS]]
        last_layer = reference.model.layers[-1]
        rotations = reference.model.rotary_emb(entering[0].unsqueeze(0), torch.arange(30).unsqueeze(0))
        mask = torch.full((30, 30), float("-inf")).triu(1)[None, None]
        out = last_layer(entering[-1].unsqueeze(0), attention_mask=mask, position_embeddings=rotations)
        entering.append((out[0] if isinstance(out, tuple) else out).view(30, -1))
    taps = torch.cat([entering[each] for each in head.own.taps], 1)[:-1]  # the last token has not been run
    known, features = sequence.tokens[1:], expected.features(taps)
    rows = runner.rows(sequence)
    for token in [*drafted, None]:
        wanted = expected.rows(torch.tensor(known), features)[-1:]
        torch.testing.assert_close(rows, wanted, atol=2e-4, rtol=1e-3)
        torch.testing.assert_close(runner.logits(rows), expected.logits(wanted), atol=2e-4, rtol=1e-3)
        if token is not None:
            known, features = [*known, token], torch.cat((features, expected.recycled(wanted)))
            rows = runner.forward(torch.tensor([token]))


def test_slots_after_rejections_and_trees_are_those_of_a_fresh_run(target, tmp_path):
    head = head_of(target, save_eagle3(tmp_path / "head"))
    sequence = TokenSequence(ids(30))
    runner, full = new_runner(target, head, sequence=sequence)
    drafter = HeadDrafter(runner, Sampler(GREEDY, 0, VOCAB, CPU), ALONE)
    shape = DraftedTree(k_ary((3, 2, 1)))
    for turn in range(10):
        draft = drafter.propose(sequence, 4, shape if turn % 2 else None)
        if draft.parents is None:
            full.rows(sequence, draft.tokens)
            accepted = draft.tokens[: turn % 4]
        else:
            full.rows(sequence, draft.tokens, draft.parents)
            accepted = [draft.tokens[node] for node in (1, 5)[: turn % 3]]
        sequence.extend([*accepted, 5 + turn])
        full.settle(sequence)
    copied = TokenSequence(sequence.tokens)
    fresh, _ = new_runner(target, head, sequence=copied)
    torch.testing.assert_close(runner.rows(sequence), fresh.rows(copied), atol=1e-5, rtol=1e-4)
    assert runner.cache.length == fresh.cache.length == len(sequence) - 1
    count = len(sequence) - 1
    for ours, theirs in zip(runner.cache.layer(0), fresh.cache.layer(0), strict=True):
        torch.testing.assert_close(ours[:, :count], theirs[:, :count], atol=1e-5, rtol=1e-4)


def test_rows_before_the_window_are_not_read(target, tmp_path):
    head = head_of(target, save_eagle3(tmp_path / "head"))
    settings = Speculation("naive", "a head", window=20)
    long, short = TokenSequence(ids(300)), TokenSequence(ids(300))
    runner, _ = new_runner(target, head, settings, long)
    list(runner.read(long))
    assert runner.cache.length == 299
    other, full = new_runner(target, head, settings, short)
    full.kept.first = 299 - other.reach  # as after a restored prompt
    assert torch.equal(runner.rows(long), other.rows(short))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden_size": 128}, SettingsError, "hidden size of 128"),
        ({"vocab_size": 300}, SettingsError, "vocabulary of 300"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 9]}, CheckpointError, "different numbers of 0 to 4"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, CheckpointError, "fc.weight"),
        ({"draft_vocab_size": 91}, CheckpointError, "d2t"),
        ({"num_hidden_layers": 2}, CheckpointError, "lacks the tensor model.layers.1"),
        ({"speculators_model_type": "dspark"}, UnsupportedModel, "dspark"),
        ({"speculators_model_type": "eagle3"}, CheckpointError, "hidden_size is None"),
    ],
)
def test_wrong_heads_are_refused_before_their_weights_are_read(target, tmp_path, change, error, message):
    import json

    folder = save_eagle3(tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(error, match=message):
        checked_drafter(folder, target.shape)


@pytest.mark.parametrize("case", ["qwen3-next", "qwen3.5"])
def test_mtp_has_the_logits_of_transformers(tmp_path, case):
    family, changes = FAMILY_CASES[case]
    reference = make_hf_model(family, **changes)
    reference.save_pretrained(tmp_path)
    own, more = add_mtp(tmp_path, family, **changes)
    target = load_model(FolderCheckpoint(tmp_path), torch.float32, CPU, lambda done, total: None)
    head = checked_drafter(tmp_path, target.shape, is_mtp=True).load(target, TorchOperations())
    sequence, drafted = TokenSequence(ids(30)), ids(3, seed=1)
    runner, _ = new_runner(target, head, sequence=sequence)

    def normed(x, name):
        return torch.nn.functional.rms_norm(x, (64,), 1 + more[f"pre_fc_norm_{name}.weight"], 1e-6)

    with torch.no_grad():
        features = reference.model(torch.tensor([sequence.tokens[:-1]])).last_hidden_state[0]
        known, rows = sequence.tokens[1:], runner.rows(sequence)
        for token in [*drafted, None]:
            embeddings = reference.model.embed_tokens(torch.tensor(known))
            both = torch.cat((normed(embeddings, "embedding"), normed(features, "hidden")), 1)
            out = own.model(inputs_embeds=(both @ more["fc.weight"].T).unsqueeze(0)).last_hidden_state[0]
            torch.testing.assert_close(runner.logits(rows), reference.lm_head(out[-1:]), atol=5e-4, rtol=1e-3)
            if token is not None:
                known, features = [*known, token], torch.cat((features, out[-1:]))
                rows = runner.forward(torch.tensor([token]))


def test_a_target_without_mtp_is_told(target, tmp_path):
    make_hf_model("llama").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="--draft mtp needs a target with an MTP head"):
        checked_drafter(tmp_path, FolderCheckpoint(tmp_path).shape, is_mtp=True)


@pytest.mark.long
@pytest.mark.parametrize("tree", ["chain", "k-ary:2x2"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_tokens_are_distributed_as_in_plain_decoding(tmp_path, temperature, tree):
    """Of a target of few tokens, whose first two after a prompt have a distribution that can be enumerated."""
    vocab, runs = 6, 700
    make_hf_model("llama", vocab_size=vocab, num_hidden_layers=LAYERS, eos_token_id=None).save_pretrained(tmp_path)
    target = load_model(FolderCheckpoint(tmp_path), torch.float32, CPU, lambda done, total: None)
    head = head_of(target, save_eagle3(tmp_path / "head", vocab=4, known=vocab))
    engine, sampling = Engine(target, (), 64, head), Sampling(temperature=temperature, top_p=1)
    prompt, settings = [3, 1, 4, 1, 5], Speculation("naive", "a head", gamma2=2, tree=tree, window=64)
    counts = torch.zeros(vocab**3, dtype=torch.long)
    for seed in range(runs):
        config = GenerationConfig(max_new_tokens=3, seed=seed)
        found = tokens(engine.generate(prompt, sampling, config, settings))
        counts[found[0] * vocab**2 + found[1] * vocab + found[2]] += 1
    chances = torch.ones(vocab**3, dtype=torch.float64)
    for number in range(vocab**3):
        text = [number // vocab**2, number // vocab % vocab, number % vocab]
        rows = target.logits(target.forward(torch.tensor([*prompt, *text[:2]]), target.new_cache(16)))
        probs = (rows[-3:].double() / temperature).softmax(1)
        chances[number] = probs[range(3), text].prod()
    assert chi_square_p(counts, chances) > 1e-3


@pytest.mark.parametrize(("level", "bits"), [(None, 16), ("q4", 5), ("q8", 8.5)])
def test_a_head_is_rounded_as_its_target_is(reference, tmp_path, level, bits):
    if native_kernel() is None:
        pytest.skip("there is no native kernel")
    reference.save_pretrained(tmp_path)
    head = save_eagle3(tmp_path / "head")
    config = EngineConfig(str(tmp_path), device="cpu", dtype="bfloat16", quantize=level)
    opened = open_model(config, speculation=Speculation("naive", str(head)))
    sizes = {name: size[0] * size[1] for name, size in opened.draft.sizes().items() if len(size) == 2}
    outer = sizes.pop("lm_head.weight")
    expected = (sum(sizes.values()) * bits + outer * (8.5 if level else 16)) / 8
    engine = opened.load()
    assert engine.draft.read_cost == pytest.approx(expected, rel=0.05)
    dims = opened.draft_dimensions
    found = drafter_bits(dims, opened.weight_bits, 2)
    assert dims.layers * dims.layer_bytes(found) + dims.outer_bytes(found) == pytest.approx(expected, rel=0.01)
    prompt = ids(40)
    assert tokens(run(engine, prompt, 12, "naive", "model")) == tokens(run(engine, prompt, 12))


def test_drafts_over_the_head_s_own_tokens_have_their_distributions(target, tmp_path):
    """A chain and a tree are drawn from the head's few tokens alone; what is told of them is of the target's ids."""
    head = head_of(target, save_eagle3(tmp_path / "head"))
    sequence = TokenSequence(ids(30))
    runner, _ = new_runner(target, head, sequence=sequence)
    known = set(head.targets.tolist())
    for sampling in (Sampling(temperature=0.7, top_p=0.8), Sampling(temperature=1.0, repetition_penalty=1.1)):
        sampler = Sampler(sampling, 3, VOCAB, CPU)
        drafter = HeadDrafter(runner, sampler, ALONE)
        chain = drafter.propose(sequence, 3)
        expected = sampler.distribution(head.logits(runner.rows(sequence)), sequence.tentative)
        tree = drafter.propose(sequence, 2, DraftedTree(k_ary((3, 2))))
        for draft in (chain, tree):
            assert draft.rows.shape[1] == VOCAB and set(draft.tokens) <= known
            torch.testing.assert_close(draft.rows[:1], expected)
            assert draft.rows[0, draft.tokens[0]] > 0
