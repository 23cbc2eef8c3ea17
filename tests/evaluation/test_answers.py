"""The probability of each of several choices, against all that can be drawn from a table model."""

import json

import pytest

from offload.constraints.grammar import compile_grammar
from offload.constraints.masks import TokenMasks
from offload.constraints.matcher import GrammarMatcher
from offload.errors import TriforceError
from offload.evaluation.answers import answer_chances
from tests.constraints.test_masked_distribution import SPELLING
from tests.support.constraints import lltokenizer
from tests.support.table_models import PROMPT, TARGET, VOCAB, TableRunner

END = VOCAB - 1


class Runner(TableRunner):
    def __init__(self, table=TARGET):
        super().__init__(table)
        self.passes = 0

    def prefill(self, sequence):
        return iter(())

    def rows(self, sequence, draft=()):
        self.passes += 1
        return super().rows(sequence, draft)


def enumerated(masks, path=(), chance=1.0):
    """Yield every answer that can be drawn, token by token, with its chance."""
    text = [*PROMPT, *path]
    probs = masks.apply(TARGET[text[-2], text[-1]][None], [path])[0].softmax(-1).tolist()
    for token, prob in enumerate(probs):
        if prob and token == END:
            yield path, chance * prob
        elif prob:
            yield from enumerated(masks, (*path, token), chance * prob)


@pytest.mark.parametrize("choices", [["a", "d"], ["ab", "ac", "b"], ["abc", "abd", "bcd", "bcda"], ["c"]])
def test_choices_have_the_probability_with_which_they_are_sampled(choices):
    matcher = GrammarMatcher(compile_grammar("choices", json.dumps(choices), lltokenizer(SPELLING)))
    masks, runner = TokenMasks(matcher, [END], VOCAB), Runner()
    found = answer_chances(runner, PROMPT, masks, {END})
    assert found == pytest.approx(dict(enumerated(masks)))
    assert {b"".join(SPELLING[token] for token in ids).decode() for ids in found} == set(choices)
    assert sum(found.values()) == pytest.approx(1) and runner.passes <= 2 * len(choices)


def test_logits_that_are_no_numbers_are_an_error():
    matcher = GrammarMatcher(compile_grammar("choices", '["a", "d"]', lltokenizer(SPELLING)))
    with pytest.raises(TriforceError, match="no numbers"):
        answer_chances(Runner(TARGET * float("nan")), PROMPT, TokenMasks(matcher, [END], VOCAB), {END})
