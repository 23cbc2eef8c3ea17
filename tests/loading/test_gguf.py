"""GGUF files: their logits, and damage and nonsense in them, refused by name."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, quants

from offload.errors import CheckpointError, UnsupportedModel
from offload.loading.formats.gguf import GGUFCheckpoint
from offload.loading.formats.tensor_checks import check_tensors
from offload.loading.hub.download import open_checkpoint
from tests.support.checkpoints import IDS, logits
from tests.support.gguf import write_family, write_gguf
from tests.support.models import make_hf_model, make_tokenizer

NAN = float("nan")


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_1"])
def test_gguf_gives_the_dequantised_models_logits(llama_dir, tmp_path, kind):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama_dir, dtype=torch.float32).eval()
    kind = GGMLQuantizationType[kind]
    write_gguf(tmp_path / "model.gguf", model, kind)
    with torch.inference_mode():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:  # what the file holds, seen without our reader
                weight.copy_(torch.from_numpy(quants.dequantize(quants.quantize(weight.numpy(), kind), kind)))
            assert torch.isfinite(weight).all(), name
        expected = model(IDS[None]).logits[0]
    found = logits(open_checkpoint(tmp_path / "model.gguf"))
    assert (found - expected).abs().max() < 1e-4


def test_gguf_rope_divisors_are_applied(llama_dir, tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama_dir, dtype=torch.float32).eval()
    divisors = np.linspace(1, 4, model.config.head_dim // 2, dtype=np.float32)
    write_gguf(tmp_path / "model.gguf", model, GGMLQuantizationType.F32, extra=[("rope_freqs.weight", divisors)])
    rotary = model.model.rotary_emb
    rotary.inv_freq.copy_(rotary.inv_freq / torch.from_numpy(divisors))
    with torch.inference_mode():
        expected = model(IDS[None]).logits[0]
    assert (logits(GGUFCheckpoint(tmp_path / "model.gguf")) - expected).abs().max() < 1e-4


def test_gguf_of_another_architecture_is_refused(llama_dir, tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama_dir)
    write_gguf(tmp_path / "model.gguf", model, GGMLQuantizationType.F32, architecture="mamba")
    with pytest.raises(UnsupportedModel, match="mamba"):
        GGUFCheckpoint(tmp_path / "model.gguf")


@pytest.mark.parametrize("keep", [0, 300, 0.5, 0.99])
def test_truncated_gguf_is_found_before_loading(llama_dir, tmp_path, keep):
    from transformers import AutoModelForCausalLM

    path = tmp_path / "model.gguf"
    write_gguf(path, AutoModelForCausalLM.from_pretrained(llama_dir), GGMLQuantizationType.F32)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(CheckpointError):
        check_tensors(GGUFCheckpoint(path))


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    model = make_hf_model("llama", tie_word_embeddings=False)
    write_gguf(path, model, tokenizer=make_tokenizer(), rope={"factor": 4.0, "original_max_position_embeddings": 512})
    return path


@pytest.mark.parametrize(
    ("key", "name", "value"),
    [
        ("llama.block_count", "num_hidden_layers", 0),
        ("llama.attention.head_count_kv", "num_key_value_heads", 3),
        ("llama.attention.layer_norm_rms_epsilon", "rms_norm_eps", NAN),
        ("llama.rope.freq_base", "rope_theta", 0.0),
        ("llama.rope.scaling.factor", "factor", -2.0),
    ],
)
def test_impossible_metadata_is_refused_by_name(gguf, tmp_path, key, name, value):
    field = GGUFReader(gguf).fields[key]
    at = field.offset + sum(part.nbytes for part in field.parts[:-1])
    data = bytearray(gguf.read_bytes())
    data[at : at + 4] = np.array([value], field.parts[-1].dtype).tobytes()
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{name} is ") as caught:
        GGUFCheckpoint(tmp_path / "model.gguf")
    assert caught.value.hint


def test_keys_that_few_files_have_are_read(tmp_path):
    def change(writer):
        writer.add_array("llama.feed_forward_length", [96, 96])
        writer.add_string("llama.rope.scaling.type", "yarn")
        writer.add_float32("llama.rope.scaling.factor", 4.0)
        writer.add_float32("llama.rope.scaling.yarn_beta_fast", 16.0)
        writer.add_uint32("tokenizer.ggml.eom_token_id", 7)

    write_family(tmp_path / "model.gguf", make_hf_model("llama", tie_word_embeddings=False), change=change)
    shape = GGUFCheckpoint(tmp_path / "model.gguf").shape
    assert shape.rope["beta_fast"] == 16 and 7 in shape.eos_ids and shape.intermediate == 96


def test_parts_are_known_by_their_names(tmp_path):
    whole, first = tmp_path / "whole.gguf", tmp_path / "m-00001-of-00002.GGUF"
    write_gguf(whole, make_hf_model("llama", tie_word_embeddings=False))
    whole.rename(first)
    with pytest.raises(CheckpointError, match=r"one of 2 parts, and m-00002-of-00002\.GGUF is missing"):
        GGUFCheckpoint(first)


@pytest.mark.parametrize(("number", "kind"), [(41, "Q1_0"), (42, "Q2_0"), (9, "Q8_1"), (99, "type 99")])
def test_a_type_that_cannot_be_dequantised_is_refused_by_its_name(tmp_path, number, kind):
    path = tmp_path / "model.gguf"
    write_gguf(path, make_hf_model("llama", hidden_size=128, tie_word_embeddings=False))
    data, name = bytearray(path.read_bytes()), b"blk.0.attn_q.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8  # behind the number of axes and the sizes
    data[at : at + 4] = number.to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(UnsupportedModel, match=rf"blk\.0\.attn_q\.weight is stored as {kind}"):
        check_tensors(GGUFCheckpoint(path))


@pytest.mark.parametrize("divisors", [np.ones(7), np.zeros(8), np.full(8, NAN)], ids=["7", "zeros", "nan"])
def test_impossible_rope_divisors_are_refused(tmp_path, divisors):
    extra = [("rope_freqs.weight", divisors.astype(np.float32))]
    write_gguf(tmp_path / "model.gguf", make_hf_model("llama", tie_word_embeddings=False), extra=extra)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight is not 8 positive numbers"):
        GGUFCheckpoint(tmp_path / "model.gguf")


@pytest.mark.parametrize("name", ["abc", "blk.attn_q.weight", "a.b.c.d.attn_q.weight", "."])
def test_tensors_with_other_names_do_no_harm(tmp_path, name):
    model = make_hf_model("llama", tie_word_embeddings=False)
    write_gguf(tmp_path / "model.gguf", model, extra=[(name, np.ones(4, np.float32))])
    check_tensors(GGUFCheckpoint(tmp_path / "model.gguf"))
