"""The tasks on long texts: what is hidden where, and how answers are scored."""

from collections import Counter
from itertools import islice

import pytest

from offload.evaluation.tasks import TASKS
from offload.evaluation.tasks.task import TextTooShort, _most_units, enough, hide, make_item
from offload.evaluation.tasks.words import prose
from triforce_cli.evaluate.intervals import bootstrap, wilson

LENGTH = 700
SENTENCES = enough(prose(), LENGTH)


def count(text):
    return len(text.split())


def item_of(name, depth=0.25, seed=0, length=LENGTH):
    return make_item(TASKS[name], length, depth, seed, SENTENCES, count)


@pytest.mark.parametrize("name", TASKS)
def test_an_item_fills_its_length_and_is_the_same_each_time(name):
    item = item_of(name)
    used = count(item.prompt) + item.new_tokens
    assert LENGTH - 60 < used <= LENGTH
    assert item == item_of(name) and item.answers != item_of(name, seed=1).answers
    assert item.depth == (0.25 if TASKS[name].has_depth else None)
    assert item.prompt.startswith(item.text) and item.prompt.endswith(item.start)
    with pytest.raises(TextTooShort):
        item_of(name, length=20)


@pytest.mark.parametrize("name", TASKS)
def test_the_right_answer_scores_1_and_another_item_s_does_not(name):
    item, other = item_of(name), item_of(name, seed=1)
    right = " " + ", ".join(item.answers)
    assert item.score(right) == 1
    assert item.score(right + " and so on, word for word.") == 1
    assert item.score("") == 0
    assert item.score(" " + ", ".join(other.answers)) < 0.7


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.has_depth and name != "turns"])
@pytest.mark.parametrize("depth", [0.1, 0.9])
def test_what_is_asked_for_lies_at_its_depth(name, depth):
    item = item_of(name, depth)
    found = item.text.index(item.answers[0]) / len(item.text)
    assert found == pytest.approx(depth, abs=0.06)
    assert all(answer in item.text for answer in item.answers)


def test_distractors_are_like_the_needle_and_have_other_numbers():
    item = item_of("multikey")
    said = [each for each in item.text.split(". ") if each.startswith("The magic number of the")]
    values = [each.rpartition(" ")[2].strip(".") for each in said]
    assert len(set(values)) == 8 and item.answers[0] in values
    key = item.start.removeprefix("The magic number of ").removesuffix(" is")
    assert sum(key in each for each in said) == 1


def test_the_variables_of_a_chain_follow_from_each_other():
    item = item_of("tracking")
    value = item.question.split()[-1].strip("?")
    assigned = dict(assignments(item.text))
    for name in item.answers:
        at = name
        while not at.isdigit():
            at = assigned[at]
        assert at == value
    others = set(assigned) - set(item.answers)
    assert len(others) == 5 and item.score(" ".join(others)) == 0


def assignments(text):
    """Yield the assignments of a text: a name, and its value or the name of another."""
    words = text.replace(".", " ").split()
    for at, word in enumerate(words):
        if word == "=":
            yield words[at - 1], words[at + 2] if words[at + 1] == "VAR" else words[at + 1]


@pytest.mark.parametrize("name", ["common-words", "frequent-words"])
def test_the_words_asked_for_are_the_most_frequent(name):
    item = item_of(name)
    words = [word for word in item.text.split() if not word[0].isdigit()]
    most = Counter(words).most_common(len(item.answers))
    assert {word for word, _ in most} == set(item.answers)


def test_the_turn_asked_for_is_one_of_four_equal_requests():
    for number, depth in enumerate([0.1, 0.3, 0.6, 0.9]):
        item = item_of("turns", depth)
        request = "Write a " + item.question.removesuffix(", word for word.").split(" ", 4)[4]
        turns = [each for each in item.text.split("User: ") if each.startswith(request)]
        assert len(turns) == 4 and item.answers[0] in turns[number]
        wrong = turns[(number + 1) % 4].partition("Assistant: ")[2]
        assert item.score(wrong) < 0.7


def test_a_quotation_is_scored_up_to_the_first_other_word():
    item = item_of("quotation")
    words = item.answers[0].split()
    assert item.score(" ".join([*words[:4], "wrong", *words[5:]])) == 4 / len(words)


def test_a_text_of_the_user_that_is_too_short_is_refused():
    with pytest.raises(TextTooShort, match="too short for 700"):
        make_item(TASKS["single"], LENGTH, 0.5, 0, SENTENCES[:20], count)


def test_the_most_units_that_fit_are_found_with_few_counts():
    sizes = list(map(len, SENTENCES))  # some sentences are half as long again as others
    for length, most in ((30, 600), (700, 600), (20_000, 600), (5000, 3), (99_999, 600), (6000, 64)):
        counted = []

        def tokens(units, counted=counted):
            counted.append(units)
            return 40 + sum(sizes[:units])

        found = _most_units(tokens, length, most)
        assert found == max([units for units in range(1, most + 1) if 40 + sum(sizes[:units]) <= length], default=0)
        assert len(counted) <= 12


def test_pieces_are_hidden_at_their_depths_in_order():
    units = list(map(str, range(10)))
    assert hide(units, [(0.0, "a"), (0.5, "b"), (1.0, "c")]) == ["a", *units[:5], "b", *units[5:], "c"]


def test_the_prose_is_the_same_each_time():
    assert list(islice(prose(), 5)) == SENTENCES[:5]


def test_wilson_s_interval():
    """Of 8 of 10: .490 to .943, as in Brown, Cai and DasGupta 2001; never beyond 0 and 1."""
    assert wilson([1] * 8 + [0] * 2) == pytest.approx((0.490, 0.943), abs=1e-3)
    assert wilson([1] * 10) == pytest.approx((0.722, 1.0), abs=1e-3) and wilson([0])[0] == 0


def test_the_bootstrap_s_interval():
    low, high = bootstrap([0, 0, -1, -1, 0, -1, 0, 0, 0, 0])
    assert -0.7 < low < -0.4 and -0.1 <= high <= 0 and bootstrap([0.0] * 5) == (0, 0)
    assert bootstrap([0, -1] * 50) != bootstrap([0, -1] * 5)
