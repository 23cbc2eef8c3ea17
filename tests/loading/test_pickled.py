"""Pickled weights: converted once by `pull`, refused at run time, and never allowed to run code."""

import json
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from offload.errors import CheckpointError, FetchError, ModelNotFound, UnsupportedModel
from offload.loading.hub import pickled
from offload.loading.hub.download import locate, open_checkpoint
from offload.loading.hub.pickled import converted_folder, is_pickled
from tests.support.checkpoints import logits
from tests.support.paths import ROOT


@pytest.fixture
def state(llama_dir):
    """The weights of `llama_dir`, which then has them pickled alone."""
    tensors = load_file(llama_dir / "model.safetensors")
    (llama_dir / "model.safetensors").unlink()
    torch.save(tensors, llama_dir / "pytorch_model.bin")
    return tensors


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


def pull(folder, home):
    return locate(str(folder), home, refresh=True)


def weights(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_pull_converts_once_and_a_run_finds_it(state, llama_dir, home):
    with pytest.raises(ModelNotFound, match="only pickled weights") as caught:
        locate(str(llama_dir), home)
    assert f"triforce pull {llama_dir}" in caught.value.hint
    folder = pull(llama_dir, home)
    assert locate(str(llama_dir), home) == folder == pull(llama_dir, home)
    found = weights(folder)
    assert set(found) == set(state)
    assert all(torch.equal(found[name], state[name]) and found[name].dtype == state[name].dtype for name in state)
    assert logits(open_checkpoint(folder)).shape[-1] == state["lm_head.weight"].shape[0]
    assert not list((home / "models").glob(".partial-*"))


def test_shards_are_joined_and_written_in_shards(state, llama_dir, home, monkeypatch):
    (llama_dir / "pytorch_model.bin").unlink()
    names = sorted(state)
    for number, part in enumerate((names[::2], names[1::2]), 1):
        torch.save({name: state[name] for name in part}, llama_dir / f"pytorch_model-0000{number}-of-00002.bin")
    monkeypatch.setattr(pickled, "SHARD_BYTES", 2**14)
    steps = []
    folder = locate(str(llama_dir), home, lambda what, done, total: steps.append((done, total)), refresh=True)
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert set(weights(folder)) == set(state)
    assert steps == sorted(steps) and 0 < steps[-1][0] <= steps[-1][1]
    (llama_dir / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(CheckpointError):  # a shard is missing
        pull(llama_dir, home)


def test_shared_and_strided_tensors_become_their_own(state, llama_dir, home):
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    q_proj = "model.layers.0.self_attn.q_proj.weight"
    state[q_proj] = state[q_proj].T.contiguous().T
    torch.save(state, llama_dir / "pytorch_model.bin")
    found = weights(pull(llama_dir, home))
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    assert torch.equal(found[q_proj], state[q_proj])


def test_files_of_old_torch_versions_are_read(state, llama_dir, home):
    torch.save(state, llama_dir / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert set(weights(pull(llama_dir, home))) == set(state)


class Payload:
    """Writes a file when it is unpickled without restrictions."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.write_text, (Path(self.path), "code has run"))


@pytest.mark.parametrize("wrap", [lambda evil, state: evil, lambda evil, state: state | {"extra": evil}])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_would_run_code_is_refused(state, llama_dir, home, tmp_path, monkeypatch, wrap, zipped):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # does not weaken an explicit weights_only=True
    evil, file = Payload(str(tmp_path / "ran")), llama_dir / "pytorch_model.bin"
    torch.save(wrap(evil, state), file, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match="cannot be read as tensors alone") as caught:
        pull(llama_dir, home)
    assert "safetensors version" in caught.value.hint
    assert not (tmp_path / "ran").exists()
    assert not list((home / "models").iterdir())
    with pytest.raises(ModelNotFound):
        locate(str(llama_dir), home)
    torch.load(file, weights_only=False)  # the payload works where nothing refuses it
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a pickle",
        pickle.dumps({"a": os.path.join}, 2),
        pickle.dumps([1, 2], 2),
    ],
    ids=["empty", "text", "function", "list"],
)
def test_files_without_tensors_are_refused(state, llama_dir, home, content):
    (llama_dir / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(CheckpointError):
        pull(llama_dir, home)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: list(state.values()), "not a dictionary"),
        (lambda state: {"state_dict": state}, "not a dense tensor"),
        (lambda state: state | {3: torch.ones(1)}, "not a dictionary"),
        (lambda state: state | {"x": 5}, "not a dense tensor"),
        (lambda state: state | {"x": torch.eye(3).to_sparse()}, "not a dense tensor"),
        (lambda state: state | {"x": torch.ones(1).expand(10**12)}, "larger than its data"),
        (lambda state: {}, "no tensors"),
        (lambda state: {name: tensor for name, tensor in state.items() if "norm" not in name}, "norm"),
    ],
)
def test_what_is_no_state_dict_is_refused(state, llama_dir, home, change, message):
    torch.save(change(state), llama_dir / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=message):
        pull(llama_dir, home)
    assert not list((home / "models").iterdir())


def test_an_architecture_that_does_not_run_is_refused_first(state, llama_dir, home):
    (llama_dir / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UnsupportedModel, match="gpt2"):
        pull(llama_dir, home)


def test_changed_weights_are_converted_again(state, llama_dir, home):
    """Also by weights of the same size and time, as `cp -p` and archives leave them."""
    os.utime(llama_dir / "pytorch_model.bin", ns=(0, 1))
    first, size = pull(llama_dir, home), (llama_dir / "pytorch_model.bin").stat().st_size
    torch.save({name: tensor + 1 for name, tensor in state.items()}, llama_dir / "pytorch_model.bin")
    assert (llama_dir / "pytorch_model.bin").stat().st_size == size
    os.utime(llama_dir / "pytorch_model.bin", ns=(0, 1))
    with pytest.raises(ModelNotFound):
        locate(str(llama_dir), home)
    second = pull(llama_dir, home)
    assert second != first
    name = "model.norm.weight"
    assert torch.equal(weights(second)[name], weights(first)[name] + 1)


def test_an_index_of_other_weights_is_not_taken_over(state, llama_dir, home):
    (llama_dir / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    assert set(weights(pull(llama_dir, home))) == set(state)


def test_a_corrected_config_is_converted_again(state, llama_dir, home):
    first = pull(llama_dir, home)
    (llama_dir / "generation_config.json").write_text('{"temperature": 0.123}')
    second = pull(llama_dir, home)
    assert second != first
    assert "0.123" in (second / "generation_config.json").read_text()


@pytest.mark.long
def test_an_interrupted_conversion_leaves_nothing_and_starts_anew(state, llama_dir, home):
    """Killed after the first of its files: the next call removes the remains and converts."""
    code = f"""
        import os, signal
        from pathlib import Path
        from offload.loading.hub import pickled
        pickled.SHARD_BYTES = 2**14
        write = pickled._write_shard
        def killed(shard, target, number):
            if number == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return write(shard, target, number)
        pickled._write_shard = killed
        pickled.convert_pickled(Path({str(llama_dir)!r}), Path({str(home)!r}), lambda *_: None)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode < 0, done.stderr
    assert len(list((home / "models").glob(".partial-*/model/*.safetensors"))) == 1
    assert not converted_folder(llama_dir, home).exists()
    folder = pull(llama_dir, home)
    assert set(weights(folder)) == set(state)
    assert list((home / "models").iterdir()) == [folder]


def test_a_full_disk(state, llama_dir, home, monkeypatch):
    monkeypatch.setattr(pickled.shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
    with pytest.raises(FetchError, match=r"0\.0 GB are free"):
        pull(llama_dir, home)


def test_a_hub_model_with_pickled_weights(state, llama_dir, tmp_path, home, monkeypatch):
    from huggingface_hub import constants

    cache = tmp_path / "models--someone--tiny"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("0123abc")
    (cache / "snapshots").mkdir()
    snapshot = cache / "snapshots" / "0123abc"
    llama_dir.rename(snapshot)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFound) as caught:  # found without asking the hub
        locate("someone/tiny", home)
    assert "triforce pull someone/tiny" in caught.value.hint
    monkeypatch.setattr("offload.loading.hub.download._download", lambda name, files: snapshot)
    folder = locate("someone/tiny", home, refresh=True)
    assert folder.name.startswith("someone--tiny-")
    assert locate("someone/tiny", home) == folder


def test_safetensors_beside_a_pickle_are_read_as_they_are(llama_dir, home):
    (llama_dir / "pytorch_model.bin").write_bytes(b"never read")
    assert not is_pickled(llama_dir)
    assert locate(str(llama_dir), home) == llama_dir
    assert not (llama_dir / "model.safetensors.index.json").exists()
    assert json.loads((llama_dir / "config.json").read_text())


def test_a_torch_whose_unpickler_has_a_known_hole_reads_no_pickles(state, llama_dir, home, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    with pytest.raises(CheckpointError, match=r"2\.9\.1") as caught:
        pull(llama_dir, home)
    assert "upgrade torch" in caught.value.hint
    assert not (home / "models").exists() or not any((home / "models").iterdir())
