"""Unicode that was cut inside a character or holds a few broken bytes, distinguished from older encodings."""

import codecs

import pytest

from offload.errors import PromptError
from tests.support.paths import DATA
from triforce_cli.input.encoding import decode, replace_broken

BOOK = DATA / "moby-dick-opening.txt"
WESTERN = DATA / "frankenstein-cp1252.txt"
TEXT = "“Stay,” said he; “it’s only a café — 日本 👍.”\n"


def read(data: bytes) -> tuple[str, list[str]]:
    warnings = []
    return decode(data, "book.txt", warnings.append), warnings


@pytest.mark.parametrize("place", range(1, len(TEXT.encode())))
def test_a_text_cut_anywhere_is_utf_8(place):
    data = (TEXT * 3).encode()
    for part, at in ((data[place:], "beginning"), (data[: place - len(data) // 3], "end")):
        text, warnings = read(part)
        assert text.strip("\ufffd") == part.decode(errors="ignore")
        assert warnings == (
            [f"book.txt is UTF-8 with 1 broken character, at the {at}; read as U+FFFD"] if "\ufffd" in text else []
        )
        assert text.count("\ufffd") == len(warnings)


def test_a_book_cut_at_both_ends():
    data = BOOK.read_bytes()
    start, end = data.index("’".encode()) + 1, data.rindex("’".encode()) + 2
    text, warnings = read(data[start:end])
    assert text == "\ufffd" + data[start:end].decode(errors="ignore").replace("\r\n", "\n") + "\ufffd"
    assert warnings == ["book.txt is UTF-8 with 2 broken characters, at the beginning and the end; read as U+FFFD"]


def test_a_few_broken_bytes_are_counted():
    data = bytearray((TEXT * 20).encode())
    places = [data.index(b"said", 200 * i) for i in range(1, 4)]
    for place in places:
        data[place] = 0xFF
    text, warnings = read(bytes(data))
    assert text == data.decode(errors="replace") and text.count("\ufffd") == 3
    where = f"the first at byte {places[0]:,} of {len(data):,}"
    assert warnings == [f"book.txt is UTF-8 with 3 broken characters, {where}; read as U+FFFD"]


def test_replacement_characters_of_the_author_are_not_counted():
    assert "with 1 broken" in read(("a \ufffd b. " + TEXT).encode() + b"\xe2")[1][0]


@pytest.mark.parametrize("cut", [b"\xe2", b"\xe2\x80"])
def test_a_cut_quote_among_few(cut):
    assert read("It’s a book".encode() + cut)[0] == "It’s a book\ufffd"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"Call me Ishmael. \xe2\x80", "Call me Ishmael. \ufffd"),
        (b"A smile \xf0\x9f\x98", "A smile \ufffd"),
        (b"\x80\x99s a book", "\ufffds a book"),
        (b"\x9f\x98\x80 smiles", "\ufffd smiles"),
    ],
)
def test_most_of_a_quote_or_an_emoji_is_enough_alone(data, text):
    assert read(data)[0] == text


@pytest.mark.parametrize("text", ["un café", "passé…", "© 2020 by the author.", "naïve", "“Plain”", "«café»"])
def test_few_western_letters_are_not_utf_8(text):
    found, warnings = read(text.encode("cp1252"))
    assert "\ufffd" not in found
    assert len(warnings) == 1 and "not UTF-8" in warnings[0]


@pytest.mark.parametrize("size", [1234, 1500])
def test_a_western_book_cut_short_is_still_western(size):
    data = WESTERN.read_bytes()[:size]
    text, warnings = read(data)
    assert text == data.decode("cp1252") and "cp1252" in warnings[0]


@pytest.mark.parametrize("encoding", ["euc_jp", "shift_jis", "gb18030"])
def test_japanese_pairs_that_look_like_utf_8_are_outweighed(encoding):
    text = "のはにとでものそのことはなのとのにはこのはとのにはのとは。"
    assert replace_broken((text * 3).encode(encoding)) is None


@pytest.mark.parametrize(
    ("mark", "encoding", "cut"),
    [
        (codecs.BOM_UTF8, "utf-8", "’".encode()[:2]),
        (codecs.BOM_UTF16_LE, "utf-16-le", b"a"),
        (codecs.BOM_UTF16_BE, "utf-16-be", "👍".encode("utf-16-be")[:2]),
        (codecs.BOM_UTF32_LE, "utf-32-le", b"a\0\0"),
    ],
)
def test_a_marked_text_cut_inside_a_character(mark, encoding, cut):
    data = mark + TEXT.encode(encoding) + cut
    text, warnings = read(data)
    assert text == TEXT + "\ufffd"
    assert len(warnings) == 1 and f"the first at byte {len(data) - len(cut):,} of {len(data):,}" in warnings[0]


@pytest.mark.parametrize("body", ["un café crème".encode("cp1252"), b"\xff" * 50])
def test_a_mark_that_is_wrong_is_an_error(body):
    with pytest.raises(PromptError, match="not valid UTF-8 at byte") as caught:
        read(codecs.BOM_UTF8 + body)
    assert caught.value.hint


def test_noise_is_refused():
    with pytest.raises(PromptError, match="unknown encoding"):
        read(bytes(range(1, 256)) * 20)
