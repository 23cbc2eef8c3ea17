"""Training of EAGLE-3 heads: what they learn, what a stopped run loses, and the files that are left."""

import json
import shutil
from collections import namedtuple
from dataclasses import replace
from math import inf

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from offload import EngineConfig
from offload.api.loader import open_model
from offload.caches.streaming_llm import StreamingCache
from offload.errors import CheckpointError, SettingsError
from offload.loading.heads import checked_drafter
from offload.settings.distillation import Distillation
from offload.training.distill import Distiller, Evaluated, Progressed
from offload.training.head import Head, HeadShape, unrolled
from offload.training.rows import Shards
from offload.training.texts import Texts
from offload.training.train import Schedule, Teacher, Trainer, acceptance
from tests.support.models import make_hf_model

SETTINGS = Distillation(
    tokens=1024, length=32, written=0.5, vocab=128, window=32, depth=2, steps=50, batch=4, rate=5e-3
)
HIDDEN, VOCAB, LAYERS = 64, 267, 2  # of the target


def words(seed, count=600):
    """Return ids in which some tokens are far more frequent than others."""
    return torch.randint(0, 40, (count, 2), generator=torch.Generator().manual_seed(seed)).prod(1).add(3).clamp(max=260)


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A target that is sure of what it says: a random one's tokens are nearly equally likely."""
    model = make_hf_model("llama", tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    folder = tmp_path_factory.mktemp("target")
    model.save_pretrained(folder)
    return open_model(EngineConfig(str(folder), device="cpu", dtype="float32"))


def distiller(opened, folder, **changes):
    settings = replace(SETTINGS, **changes)
    texts = [Texts([words(seed).tolist()], [1], settings.written, settings.length, parallel=16) for seed in (1, 2)]
    return Distiller(opened, *texts, settings, folder)


@pytest.fixture(scope="module")
def trained(opened, tmp_path_factory):
    """A folder with a finished head, and its acceptance."""
    folder = tmp_path_factory.mktemp("head")
    *_, last = distiller(opened, folder).run(inf, inf)
    return folder, last


@pytest.fixture(scope="module")
def parts(opened, trained):
    """A loaded target, its teacher, and the blocks to train on."""
    folder, model = trained[0] / "training", opened.load().model
    model.tap((0, 1))
    ids = torch.tensor(json.loads((folder / "draft-ids.json").read_text()))
    return model, Teacher(model, ids), Shards([folder / "train-0000.safetensors"], HIDDEN)


def new_head(teacher, **changes):
    shape = HeadShape(HIDDEN, 4, 2, 16, 96, 128, (0, 1), 32, 1e-6, 10000.0)
    head = Head(replace(shape, **changes))
    head.initialise(torch.Generator().manual_seed(0), torch.full((2 * HIDDEN,), 0.5), teacher.norm, teacher.rows)
    return head


def test_a_head_learns_what_its_target_says_at_each_depth(trained, parts):
    _, teacher, shards = parts
    before = acceptance(new_head(teacher), teacher, shards, 2)
    assert isinstance(trained[1], Evaluated)
    after = trained[1].acceptance  # on texts that were held out
    assert min(after.sampled) > 1.4 * max(before.sampled)
    assert min(after.greedy) > 1.2 * max(before.greedy)


def copied(folder, target, *without):
    shutil.copytree(folder / "training", target / "training", ignore=shutil.ignore_patterns("state*", *without))
    return target


@pytest.mark.parametrize("stage", ["texts and what the target makes of them", "training"])
def test_a_run_that_was_stopped_ends_with_the_same_head(opened, trained, tmp_path, stage):
    folder = copied(trained[0], tmp_path / "again", *(["train-*"] if stage != "training" else []))
    run = distiller(opened, folder).run(inf, inf)
    for event in run:
        if isinstance(event, Progressed) and event.stage == stage and event.done > (20 if stage == "training" else 0):
            break
    run.close()
    assert not (folder / "model.safetensors").exists()
    *_, last = distiller(opened, folder).run(inf, inf)
    assert last.acceptance == trained[1].acceptance
    for name in ("model.safetensors", "config.json"):
        assert (folder / name).read_bytes() == (trained[0] / name).read_bytes()


def test_a_killed_run_loses_what_it_did_since_it_last_saved(parts, tmp_path):
    _, teacher, shards = parts
    path, seconds = tmp_path / "state.safetensors", iter(range(1000))
    trainer = Trainer(new_head(teacher), teacher, shards, Schedule(9, 1, 1, 1e-3, 0), path)
    for event in trainer.run(3, clock=lambda: next(seconds)):
        saved = 0
        if path.exists():
            with safe_open(path, "pt") as file:
                saved = int(file.metadata()["step"])
        assert event.step - saved < 3
    assert Trainer(new_head(teacher), teacher, shards, trainer.schedule, path).step == 9


def test_a_state_of_another_head_is_refused(parts, tmp_path):
    _, teacher, shards = parts
    path, schedule = tmp_path / "state.safetensors", Schedule(9, 1, 1, 1e-3, 0)
    Trainer(new_head(teacher), teacher, shards, schedule, path).save()
    with pytest.raises(CheckpointError, match="not the state of this training"):
        Trainer(new_head(teacher, intermediate=32), teacher, shards, schedule, path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="not the state of this training"):
        Trainer(new_head(teacher), teacher, shards, schedule, path)


def test_the_files_are_those_of_the_speculators_format(trained):
    tensors, config = load_file(trained[0] / "model.safetensors"), json.loads((trained[0] / "config.json").read_text())
    layer = "layers.0."
    sizes = {
        "fc.weight": (64, 128),
        **{f"{layer}{name}.weight": (64,) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        **{f"{layer}self_attn.{name}_proj.weight": (32, 128) for name in "kv"},
        **{f"{layer}self_attn.{name}_proj.weight": size for name, size in (("q", (64, 128)), ("o", (64, 64)))},
        **{f"{layer}mlp.{name}_proj.weight": (96, 64) for name in ("gate", "up")},
        **{f"{layer}mlp.down_proj.weight": (64, 96), "norm.weight": (64,), "lm_head.weight": (128, 64)},
        **{"d2t": (128,), "t2d": (VOCAB,)},
    }
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == sizes
    assert {tensor.dtype for name, tensor in tensors.items() if name not in ("d2t", "t2d")} == {torch.bfloat16}
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    ids = tensors["d2t"] + torch.arange(128)  # differences
    assert torch.equal(ids, tensors["t2d"].nonzero()[:, 0])
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "eagle3"
    assert config["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]
    assert (config["draft_vocab_size"], config["norm_before_residual"]) == (128, True)
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1]
    own = config["transformer_layer_config"]
    assert (own["model_type"], own["num_hidden_layers"], own["vocab_size"]) == ("llama", 1, VOCAB)
    assert (own["layer_types"], own["sliding_window"]) == (["sliding_attention"], 32)


def test_what_was_trained_is_what_drafts(opened, trained, parts):
    """The loaded head gives the logits that training gave, in the first step and when its own rows are fed back."""
    model, teacher, shards = parts
    checkpoint = checked_drafter(trained[0], opened.checkpoint.shape)
    loaded = checkpoint.load(model, model.operations)
    head = Head(HeadShape.for_target(opened.checkpoint.shape, 128, 32))
    Trainer(head, teacher, shards, Schedule(60, 4, 2, 5e-3, 0), trained[0] / "training" / "state.safetensors")
    blocks = shards.read([0], torch.device("cpu"))
    with torch.no_grad():
        steps = [each[0] for each in unrolled(head, teacher.embedded(blocks), blocks.taps, 3)]
    rows = torch.cat((blocks.rows[0], blocks.taps[0].to(model.dtype)), -1)
    at = 20  # within the window
    cache = StreamingCache(loaded.shape, loaded.rope(64), 0, 48, 32, model.dtype, model.device)
    ids = blocks.ids[0]
    found = loaded.run(ids[1 : at + 2], loaded.features(rows[: at + 1]), cache)[-1:]
    for step, expected in enumerate(steps, 1):
        logits = loaded.logits(found)[0, teacher.draft_ids]
        assert (logits - expected[at]).abs().max() < 0.02 * expected[at].abs().max()  # weights are rounded to bf16
        found = loaded.run(ids[at + 1 + step : at + 2 + step], loaded.recycled(found), cache)


def test_slots_see_the_window_and_no_future(parts):
    _, teacher, shards = parts
    head = new_head(teacher, window=8)
    blocks = shards.read([0], torch.device("cpu"))
    embedded, taps = teacher.embedded(blocks), blocks.taps

    def outputs(taps):
        with torch.no_grad():
            return list(unrolled(head, embedded, taps, 2))

    changed = taps.clone()
    changed[:, 20] += 1
    for one, two in zip(outputs(taps), outputs(changed), strict=True):
        assert (one != two).any(-1)[0].nonzero()[:, 0].tolist() == list(range(20, 28))


def test_texts_are_whole_blocks_and_those_of_a_seed(opened):
    engine = opened.load()
    texts = Texts([words(3).tolist(), words(4, 80).tolist()], [1], 0.4, 32, parallel=4)
    made = texts.make(engine, 10, "a")
    assert sum(map(len, made)) == 10 * 32 and all(len(text) % 32 == 0 for text in made)
    assert len(made[:4]) == 4 and {len(text) for text in made[:4]} == {32}
    spans = [str(text.tolist())[1:-1] for text in (words(3), words(4, 80))]
    assert all(any(str(text)[1:-1] in span for span in spans) for text in made[4:])  # as they stand there
    assert texts.make(engine, 10, "a") == made != texts.make(engine, 10, "b")
    alone = Texts([], [1], 0.0, 32).make(engine, 2, "a")
    assert [len(text) for text in alone] == [32, 32] and {text[0] for text in alone} == {1}


def test_another_training_is_not_gone_on_with(opened, trained, tmp_path):
    folder = copied(trained[0], tmp_path / "again")
    with pytest.raises(SettingsError, match="another window"):
        distiller(opened, folder, window=64)
    distiller(opened, folder, steps=80, tokens=4096)  # it may be made longer


def test_too_little_disk_is_said_before_anything_is_computed(opened, tmp_path, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000))
    with pytest.raises(SettingsError, match=r"take .* MiB, and .* has 1000 B of disk space"):
        next(distiller(opened, tmp_path).run(inf, inf))


def test_few_tokens_make_small_shards(opened, tmp_path):
    """Not whole ones, which take minutes on a CPU; with more tokens the run goes on with whole ones."""
    list(distiller(opened, tmp_path, tokens=33 * 32, steps=1).run(inf, inf))
    assert set(sizes_of(tmp_path)) == {"held-out-0000", "train-0000", "train-0001-1"}
    few = tmp_path / "few"
    *_, last = distiller(opened, few, tokens=3 * 32, steps=1).run(inf, inf)
    assert sizes_of(few) == {"held-out-0000-3": 96, "train-0000-3": 96}
    assert last.acceptance.sampled[0] > 0


def sizes_of(folder):
    """Return the tokens of each shard."""
    files = (folder / "training").glob("*-*.safetensors")
    return {file.stem: load_file(file)["ids"].numel() for file in files}


def test_settings_are_checked():
    for name, value in {"length": 8, "written": 1.5, "rate": 0.0, "depth": 0, "steps": 0, "seed": -1}.items():
        with pytest.raises(SettingsError, match=name):
            Distillation(**{name: value})


def test_the_schedule_takes_each_block_once_in_an_epoch():
    schedule = Schedule(10, 3, 4, 1.0, 0)
    blocks = [block for step in range(4) for block in schedule.blocks_at(step, 6)]
    assert sorted(blocks[:6]) == sorted(blocks[6:]) == list(range(6)) and blocks[:6] != blocks[6:]
    assert [schedule.depth_at(step) for step in range(10)] == [1] * 5 + [4] * 5
    assert schedule.cost(10) == 25 and schedule.cost(5) == 5
    rates = [schedule.rate_at(step) for step in range(10)]
    assert max(rates) == 1.0 and rates[-1] < 0.2 and rates[1:] == sorted(rates[1:], reverse=True)
