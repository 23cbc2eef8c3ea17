"""Pickled weights: read as they are, and never allowed to run code."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from offload.errors import CheckpointError
from offload.loading.formats.tensor_checks import check_tensors
from offload.loading.hub.download import locate, open_checkpoint
from tests.support.checkpoints import logits


@pytest.fixture
def state(llama_dir):
    """The weights of `llama_dir`, which then has them pickled alone."""
    tensors = load_file(llama_dir / "model.safetensors")
    (llama_dir / "model.safetensors").unlink()
    torch.save(tensors, llama_dir / "pytorch_model.bin")
    return tensors


@pytest.mark.parametrize("has_shards", [False, True])
def test_pickled_weights_are_the_same_model(tiny_model_dir, state, llama_dir, has_shards):
    if has_shards:
        (llama_dir / "pytorch_model.bin").unlink()
        shards = {name: f"pytorch_model-{len(name) % 2}.bin" for name in state}
        for shard in set(shards.values()):
            torch.save({name: state[name] for name in state if shards[name] == shard}, llama_dir / shard)
        (llama_dir / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": shards}))
    checkpoint = open_checkpoint(locate(str(llama_dir)))
    check_tensors(checkpoint)
    assert all(path.suffix == ".bin" for path in checkpoint.files())
    with checkpoint.opened() as weights:
        assert all(torch.equal(weights[name].read(), tensor) for name, tensor in state.items())
    assert logits(checkpoint).shape[-1] == state["lm_head.weight"].shape[0]


class Payload:
    """Writes a file when it is unpickled without restrictions."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.write_text, (Path(self.path), "code has run"))


def test_a_pickle_that_would_run_code_is_refused(state, llama_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # does not weaken an explicit weights_only=True
    file = llama_dir / "pytorch_model.bin"
    torch.save(state | {"extra": Payload(str(tmp_path / "ran"))}, file)
    with pytest.raises(CheckpointError, match="cannot be read") as caught:
        check_tensors(open_checkpoint(llama_dir))
    assert "safetensors version" in caught.value.hint
    assert not (tmp_path / "ran").exists()
    torch.load(file, weights_only=False)  # the payload works where nothing refuses it
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: list(state.values()), "not a dictionary of tensors"),
        (lambda state: state | {"x": 5}, "not a dictionary of tensors"),
        (lambda state: {name: tensor for name, tensor in state.items() if "norm" not in name}, "norm"),
    ],
)
def test_what_is_no_state_dict_is_refused(state, llama_dir, change, message):
    torch.save(change(state), llama_dir / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=message):
        check_tensors(open_checkpoint(llama_dir))


def test_a_torch_whose_unpickler_has_a_known_hole_reads_no_pickles(state, llama_dir, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    with pytest.raises(CheckpointError, match=r"2\.9\.1"):
        check_tensors(open_checkpoint(llama_dir))


def test_safetensors_beside_a_pickle_are_read(llama_dir):
    (llama_dir / "pytorch_model.bin").write_bytes(b"never read")
    assert [path.name for path in open_checkpoint(llama_dir).files()] == ["model.safetensors"]
