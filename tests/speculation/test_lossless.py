"""The comparison of a run with plain decoding."""

from offload import EngineConfig, open_model
from tests.support.engine import fresh, run, tokens
from tests.support.models import ids, make_hf_model, make_tokenizer


def test_a_replay_of_a_run_that_ended_early_uses_the_same_rope(tmp_path):
    """RoPE may depend on the length that the sequence could have reached."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    make_hf_model("llama", max_position_embeddings=64, rope_parameters=rope).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    engine = open_model(EngineConfig(model=str(tmp_path), dtype="float32", device="cpu")).load().without_end()
    emitted = tokens(run(engine, ids(40), 200))[:30]
    assert engine.replay(ids(40), emitted, length=240).equal
    assert not engine.replay(ids(40), emitted).lossless


def test_a_replay_of_another_prompt_does_not_change_the_next_request(endless_engine):
    engine = fresh(endless_engine)
    first = tokens(run(engine, ids(60), 20))
    engine.replay(ids(60, 1), ids(20, 2))
    assert tokens(run(engine, ids(60), 20)) == first


def test_the_replay_finds_tokens_that_plain_decoding_would_not_choose(endless_engine):
    engine, prompt = fresh(endless_engine), ids(100)
    emitted = tokens(run(engine, prompt, 30, "triforce"))
    result = engine.replay(prompt, emitted)
    assert result.equal
    assert result.lossless
    wrong = [*emitted[:12], (emitted[12] + 1) % 267, *emitted[13:]]
    result = engine.replay(prompt, wrong)
    first = result.divergences[0]
    assert (first.position, first.emitted, first.expected) == (12, wrong[12], emitted[12])
    assert first.margin > 10 * first.noise
    assert not result.lossless
