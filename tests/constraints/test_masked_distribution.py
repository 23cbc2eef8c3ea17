"""With a constraint every method emits the renormalised product over all valid continuations, by brute force."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from offload.constraints.grammar import compile_grammar
from offload.constraints.masks import TokenMasks
from offload.constraints.matcher import AfterThinking, GrammarMatcher
from offload.errors import TriforceError
from offload.loading.tokenizers.thinking import Thinking, ThinkingFormat
from offload.settings.config import Sampling
from offload.speculation.levels.level import Level
from offload.speculation.sampling.warp import Sampler
from offload.speculation.trees.tree import NOTHING, Draft
from tests.support.constraints import lltokenizer
from tests.support.table_models import (
    PROMPT,
    TARGET,
    TOKENS,
    VOCAB,
    chi_square_p,
    counted,
    hierarchy,
    number,
)

SPELLING = [b"a", b"b", b"c", b"d", b"ab", b"cd", b"bc", b"<end>"]
PARTS = ("abc", "abd", "ac", "ad", "bc", "bd", "c", "d")
REGEX = f"({'|'.join(PARTS)}){{6,9}}"  # no text of three tokens is complete
WARM, HOT = Sampling(temperature=0.7, top_p=1), Sampling(temperature=1.5, top_p=1)
RUNS, SIGNIFICANCE = 500, 1e-3
METHODS = [
    ("ar", "none", {}),
    ("lookup", "lookup", {}),
    ("retrieval", "none", {}),
    ("naive", "good", {}),
    ("triforce", "uniform", {}),
    ("streaming", "lookup", {}),
    ("auto", "adversarial", {}),
    ("naive", "uniform", {"tree": "k-ary:3x2"}),
    ("retrieval", "lookup", {"tree": "5"}),
    ("triforce", "good", {"tree": "6", "tree_sampling": "top-k"}),
]


def constrained(text=REGEX, kind="regex"):
    return TokenMasks(GrammarMatcher(compile_grammar(kind, text, lltokenizer(SPELLING))), [VOCAB - 1], VOCAB)


def prefixes(length=2 * TOKENS):
    """Return every beginning of a text of the language, up to a length."""
    whole = {""}
    for _ in range(length):
        whole |= {text + part for text in whole for part in PARTS if len(text) < length}
    return {text[:end] for text in whole for end in range(length + 1)}


def masked_joint(sampling):
    """Return the exact distribution of the first tokens, `[VOCAB ** TOKENS]`."""
    known = prefixes()
    result = torch.zeros(VOCAB**TOKENS, dtype=torch.float64)
    for run in itertools.product(range(VOCAB - 1), repeat=TOKENS):
        text, chance, spelt = PROMPT[-2:], 1.0, ""
        for token in run:
            may = [spelt + each.decode() in known for each in SPELLING[:-1]]
            weights = (TARGET[text[-2], text[-1]].double() / sampling.temperature).exp()[:-1] * torch.tensor(may)
            chance *= float(weights[token] / weights.sum())
            text, spelt = [*text, token], spelt + SPELLING[token].decode()
            if not chance:
                break
        result[number(run)] = chance
    return result


@pytest.fixture(scope="module")
def expected():
    return {each: masked_joint(each) for each in (WARM, HOT)}


@pytest.mark.daily("hot-naive-good-*")
@pytest.mark.parametrize(("method", "draft", "trees"), METHODS)
@pytest.mark.parametrize("sampling", [WARM, HOT], ids=["warm", "hot"])
def test_every_method_has_the_distribution_of_brute_force(expected, sampling, method, draft, trees):
    gammas = (None, None) if method == "auto" else (2, 3)
    top = hierarchy(method, draft, sampling, gammas, penalised=True, masks=constrained(), **trees).top
    assert chi_square_p(counted(top, RUNS), expected[sampling]) > SIGNIFICANCE


def test_a_mask_depends_on_the_row_s_own_history_alone():
    tried, texts = constrained(), [(), (0,), (0, 6), (4, 3), (2, 2, 2), (4,), (0, 1, 3), (3, 4), ()]
    for path in texts:
        fresh = constrained()
        fresh.observe(path)
        assert (tried.allowed(path) == fresh.allowed(())).all()
    assert tried.allowed((1, 0)) is None  # "ba": no text of the language
    assert tried.allowed(()) is not None


def test_allowed_tokens_that_the_logits_rule_out_are_equally_likely():
    allowed = torch.from_numpy(constrained().allowed((0,)))  # after "a"
    assert 1 < allowed.sum() < VOCAB - 1
    logits = torch.arange(3.0 * VOCAB).reshape(3, VOCAB)
    logits[:2, allowed] = logits[2] = float("-inf")
    likely = int(allowed.nonzero()[0])
    logits[1, likely] = 0.5
    found = Sampler(WARM, 0, VOCAB, torch.device("cpu"), masks=constrained()).distribution(logits, paths=[(0,)] * 3)
    assert torch.equal(found[0], allowed / allowed.sum())
    assert torch.equal(found[1], torch.eye(VOCAB)[likely])
    assert found[2].isnan().all()  # the model is broken: an error where a token is read


def test_what_the_constraint_rules_out_is_cut_from_drafts_that_nothing_was_drawn_for():
    def possible(before, draft):
        level = Level("full", SimpleNamespace(relative_cost=1), sampler, None)
        return level._possible(SimpleNamespace(tentative=before), draft)

    sampler = Sampler(WARM, 0, VOCAB, torch.device("cpu"), masks=constrained())
    assert possible([], Draft([0, 6, 3, 1, 0], None)) == Draft([0, 6, 3, 1], None)  # "ba" is not allowed
    assert possible([1], Draft([0, 6], None)) == NOTHING
    tree = Draft([0, 1, 1, 0, 3, 2], None, (-1, -1, 0, 1, 2, 2))  # a-b-d, a-b-c; b-a
    assert possible([], tree) == Draft([0, 1, 1, 3, 2], None, (-1, -1, 0, 2, 2))
    drawn = Draft([1, 0], torch.ones(2, VOCAB))
    assert possible([], drawn) is drawn
    sampler.observe([1, 0])  # all is lost: there is nothing to bind
    assert possible([], Draft([1, 0], None)) == Draft([1, 0], None)


DEAD_END = 'start: "a" | "b" X\nX: /(c[0-9]*)/ & ~/(.|\\n)*/\n'  # nothing is an X, which is found out late


def test_a_dead_end_is_an_error_where_it_is_reached_and_not_where_it_is_drafted():
    masks, accepted, spared = (constrained(DEAD_END, "grammar") for _ in range(3))
    assert masks.allowed((1,)) is None
    assert list(masks.allowed(()).nonzero()[0]) == [0, 1] and list(masks.allowed((0,)).nonzero()[0]) == [VOCAB - 1]
    logits = torch.zeros(2, VOCAB)
    assert masks.apply(logits, [(1,), (0,)])[0].equal(logits[0])
    assert masks.possible([1, 2], [-1, 0]) == [0]
    masks.observe([1])
    with pytest.raises(TriforceError, match="no way on"):
        masks.allowed(())
    accepted.allowed((1,))
    with pytest.raises(TriforceError, match="no way on"):
        accepted.observe([1, 2])
    spared.allowed((1,))
    spared.observe([0])
    assert spared.allowed(()).any()


def test_an_answer_does_not_end_within_the_thinking():
    """It would have none of the form that was asked for."""
    matcher = GrammarMatcher(compile_grammar("choices", '["d", "a"]', lltokenizer(SPELLING)))
    masks = TokenMasks(AfterThinking(matcher, SPELLING, Thinking(ThinkingFormat("x", "cd"), True)), [VOCAB - 1], VOCAB)
    for thought in ((), (0,), (0, 2)):
        assert list(masks.allowed(thought)) == [True] * (VOCAB - 1) + [False]
    answer = masks.allowed((0, 5))
    assert list(answer.nonzero()[0]) == [0, 3]
    assert list(masks.allowed((2, 3, 3)).nonzero()[0]) == [VOCAB - 1]
