"""The embedded model on real books: speculation equals plain decoding, and retrieval finds distant text."""

import pytest
import torch

from offload import EngineConfig, GenerationConfig, Sampling, Speculation, Tokens, open_model
from offload.caches.factory import selected_cache
from offload.sequence import TokenSequence
from offload.speculation.passes.runner import Runner
from offload.speculation.passes.selected_runner import SelectedRunner
from tests.support.paths import DATA, ROOT

BOOKS = {
    "frankenstein": ROOT / "examples" / "frankenstein.txt",
    "moby-dick": DATA / "moby-dick-opening.txt",
    "pride-and-prejudice": DATA / "pride-and-prejudice-opening.txt",
}
PROMPT, NEW = 800, 24
pytestmark = pytest.mark.long
METHODS = [("auto", "lookup"), ("lookup", "lookup"), ("triforce", "lookup"), ("streaming", "lookup")]
METHODS += [("retrieval", "none"), ("naive", "model"), ("triforce", "model"), ("auto", "model")]
TREES = [
    ("naive", "model", "k-ary:2x2x1"),
    ("lookup", "lookup", "16"),
    ("retrieval", "none", "16"),
    ("streaming", "none", "k-ary:3x2x1x1"),
    ("triforce", "model", "12"),
    ("triforce", "lookup", "16"),
]


@pytest.fixture(scope="module")
def opened(embedded_model_dir):
    """Open the model, with itself as the draft model: its StreamingLLM cache makes its drafts differ."""
    config = EngineConfig(model=str(embedded_model_dir), dtype="float32", device="cpu")
    return open_model(config, speculation=Speculation("naive", str(embedded_model_dir)))


@pytest.fixture(scope="module")
def engine(opened):
    return opened.load()


def decoded(engine, ids, settings, new=NEW):
    events = engine.generate(ids, Sampling(temperature=0), GenerationConfig(max_new_tokens=new), settings)
    return [token for event in events if isinstance(event, Tokens) for token in event.ids]


@pytest.mark.parametrize("book", BOOKS)
def test_greedy_equals_plain_greedy_with_every_method_drafter_and_tree(engine, opened, book):
    """Without ties: on the native kernel a row of a tree has the bits of the chain that its path is."""
    ids = opened.tokenizer.encode(BOOKS[book].read_text("utf-8"), special_tokens=True)[:PROMPT]
    assert len(ids) == PROMPT
    expected = decoded(engine, ids, Speculation("ar"))
    trees = TREES if book == "frankenstein" else []
    for method, draft, tree in (*((*each, "chain") for each in METHODS), *trees):
        settings = Speculation(method, "a model" if draft == "model" else draft, budget=256, tree=tree)
        assert decoded(engine, ids, settings) == expected, f"{method}, {draft}, {tree}"


def test_greedy_tokens_equal_transformers(engine, opened):
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.initialization import no_init_weights

    ids = opened.tokenizer.encode(BOOKS["frankenstein"].read_text("utf-8"), special_tokens=True)[:1000]
    with no_init_weights():
        reference = LlamaForCausalLM(LlamaConfig(**opened.checkpoint.config)).eval().float()
    state = {name: weight.read() for name, weight in opened.checkpoint.weights.items()}  # dequantised by gguf
    assert set(reference.load_state_dict(state, strict=False).missing_keys) <= {"lm_head.weight"}  # tied
    reference.tie_weights()
    expected = reference.generate(
        torch.tensor([ids]), max_new_tokens=32, do_sample=False, eos_token_id=[2, 0], repetition_penalty=1.0
    )
    assert decoded(engine, ids, Speculation(), 32) == expected[0, 1000:].tolist()


CONTEXT, BUDGET = 6000, 1024
NEEDLES = {
    0.2: "velvet anchor seventeen purple river under the old stone bridge",
    0.5: "copper lantern ninety walks over the frozen garden at noon",
    0.8: "silent orchard forty sings behind a broken yellow door",
}
PLACES = {0.2: "lighthouse", 0.5: "windmill", 0.8: "monastery"}


def planted(tokenizer, depth):
    """Return a book with a passphrase at each depth, and the question for one of them up to its answer."""
    text = tokenizer.decode(tokenizer.encode(BOOKS["frankenstein"].read_text("utf-8"), special_tokens=False)[:CONTEXT])
    for share in sorted(NEEDLES, reverse=True):
        at = text.index("\n", int(share * len(text)))
        text = f"{text[:at]}\n\nThe passphrase of the {PLACES[share]} is: {NEEDLES[share]}.\n{text[at:]}"
    ids = tokenizer.chat(f"{text}\n\nWhat is the passphrase of the {PLACES[depth]}?", None)
    return [*ids, *tokenizer.encode(f"The passphrase of the {PLACES[depth]} is:", special_tokens=False)]


@torch.inference_mode()
def agreement(full, middle, prompt, answer):
    """Count the tokens of a given answer that the model chooses, and those that the middle level chooses too."""
    sequence, reproduced, agreed = TokenSequence(prompt), 0, 0
    list(full.prefill(sequence))
    middle.renew()
    for token in answer:
        wanted, drafted = (int(each.model.logits(each.rows(sequence))[0].argmax()) for each in (full, middle))
        reproduced += wanted == token
        agreed += wanted == drafted == token
        sequence.extend([token])
        sequence.commit()
    return reproduced, agreed


def test_retrieval_finds_a_needle_outside_the_window(embedded_model_dir):
    config = EngineConfig(model=str(embedded_model_dir), device="cpu")
    opened = open_model(config)
    model, tokenizer = opened.load().model, opened.tokenizer
    full = Runner(model, model.new_cache(CONTEXT + 500))
    settings = [Speculation(method, budget=BUDGET) for method in ("retrieval", "streaming")]
    middles = [SelectedRunner(full, selected_cache(full.cache, each)) for each in settings]
    totals = torch.zeros(2, 2)
    for depth, phrase in NEEDLES.items():
        answer = tokenizer.encode(f" {phrase}", special_tokens=False)
        for row, middle in enumerate(middles):
            totals[row] += torch.tensor(agreement(full, middle, planted(tokenizer, depth), answer))
    (reproduced, retrieved), (again, streamed) = totals.tolist()
    assert min(reproduced, again) >= 20  # the model itself must know most of it, or nothing is tested
    assert retrieved >= 0.9 * reproduced
    assert streamed <= 0.4 * again
