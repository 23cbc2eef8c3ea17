"""The embedded model on a real book, against transformers."""

import pytest
import torch

from offload import EngineConfig, GenerationConfig, Sampling, Tokens, open_model
from tests.support.paths import ROOT

BOOK = ROOT / "examples" / "frankenstein.txt"
PROMPT, NEW = 1000, 32


@pytest.mark.long
def test_greedy_tokens_equal_transformers_after_a_thousand_of_frankenstein(embedded_model_dir):
    from transformers import AutoConfig, LlamaForCausalLM
    from transformers.initialization import no_init_weights

    opened = open_model(EngineConfig(model=str(embedded_model_dir), dtype="float32", device="cpu"))
    ids = opened.tokenizer.encode(BOOK.read_text("utf-8"), special_tokens=True)[:PROMPT]
    events = opened.load().generate(ids, Sampling(temperature=0), GenerationConfig(max_new_tokens=NEW))
    found = [token for event in events if isinstance(event, Tokens) for token in event.ids]

    with no_init_weights():
        reference = LlamaForCausalLM(AutoConfig.from_pretrained(embedded_model_dir)).eval().float()
    with opened.checkpoint.tensors() as read:  # its weights are quantised: gguf dequantises them here
        state = {name: read(name).float() for name in opened.checkpoint.sizes()}
    assert set(reference.load_state_dict(state, strict=False).missing_keys) <= {"lm_head.weight"}  # tied
    reference.tie_weights()
    expected = reference.generate(
        torch.tensor([ids]), max_new_tokens=NEW, do_sample=False, eos_token_id=[2, 0], repetition_penalty=1.0
    )
    assert found == expected[0, PROMPT:].tolist()
    assert len(found) == NEW
