"""Ranges and parts of a document: nothing is lost, nothing is changed, and cuts are where a reader would cut."""

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from offload.errors import SettingsError, UsageError
from offload.loading.tokenizers.tokenizer import Tokenizer
from tests.support.models import make_tokenizer
from triforce_cli.input.excerpts import Position, Range, parse_position, split

TOKENIZER = Tokenizer.from_transformers(make_tokenizer())
PARAGRAPHS = [f"Paragraph {i} is about the {i}th thing. It has two sentences." for i in range(30)]
TEXT = "\n\n".join(PARAGRAPHS)


def test_positions_as_people_write_them():
    assert parse_position("10%") == Position(fraction=0.1)
    assert parse_position("2.5 %").of(1000) == 25
    assert parse_position("2000") == Position(tokens=2000)
    assert parse_position("2K").of(10) == 2048
    assert parse_position("0").of(10) == 0
    for wrong in ("-5", "101%", "ten", "", "5%%"):
        with pytest.raises(SettingsError) as raised:
            parse_position(wrong)
        assert "%" in raised.value.hint


def test_ranges_join_to_the_whole_text():
    for text in (TEXT, "  naïve — 日本語のテキスト 🙂\n\n end \n"):
        total = len(TOKENIZER.spans(text))
        middle = Position(tokens=total // 2)
        first, _ = Range(end=middle).cut(text, TOKENIZER.spans, "a")
        second, said = Range(start=middle).cut(text, TOKENIZER.spans, "a")
        assert first + second == text
        assert f"{total:,}" in said
    assert Range().cut(TEXT, TOKENIZER.spans, "a") == (TEXT, "")
    assert Range(parse_position("0%"), parse_position("100%")).cut(TEXT, TOKENIZER.spans, "a")[0] == TEXT
    assert Range(end=Position(tokens=10**6)).cut(TEXT, TOKENIZER.spans, "a")[0] == TEXT


@pytest.mark.parametrize("places", [("50%", "50%"), ("60%", "10%"), ("9999", None), ("0", "0")])
def test_a_range_without_text_is_wrong_use(places):
    start, end = (None if place is None else parse_position(place) for place in places)
    with pytest.raises(UsageError, match=r"--from .*selects no text of book"):
        Range(start, end).cut(TEXT, TOKENIZER.spans, "book")


def test_parts_are_cut_between_paragraphs_and_overlap():
    parts = split(TEXT, TOKENIZER.spans(TEXT), 400, 60)
    assert len(parts) > 3
    for part in parts:
        assert part.strip().split("\n\n")[0] in PARAGRAPHS
        assert part.strip().split("\n\n")[-1] in PARAGRAPHS
    for one, following in pairwise(parts):
        assert following.split("\n\n")[0] in one, "no overlap"
    apart = split(TEXT, TOKENIZER.spans(TEXT), 400, 0)
    assert "".join(apart) == TEXT


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="ab .\n日é", max_size=400), st.integers(8, 60))
@example("aaaaaa aé", 8)  # a border within a token
def test_parts_fit_and_join_to_the_text(text, room):
    parts = split(text, TOKENIZER.spans(text), room, 0)
    assert "".join(parts) == text
    assert all(len(TOKENIZER.spans(part)) <= room + 3 for part in parts)  # a character of several tokens stays whole


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([" ", "\n", "\n\n", ". ", "日"]), max_size=60), st.integers(24, 80), st.integers(1, 11))
def test_parts_that_overlap_leave_nothing_out(joints, room, overlap):
    text = "".join(f"w{number}{joint}" for number, joint in enumerate(joints)) + "end"
    parts = split(text, TOKENIZER.spans(text), room, overlap)
    place = 0
    for part in parts:
        found = text.find(part)
        assert 0 <= found <= place or not text[place:found].strip()
        assert len(TOKENIZER.spans(text[found:place])) <= overlap + 3
        assert len(TOKENIZER.spans(part)) <= room + 3
        place = found + len(part)
    assert place == len(text)
