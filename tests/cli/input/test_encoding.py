"""Texts in other encodings than UTF-8: told by a mark, or guessed with a warning."""

import pytest

from offload.errors import PromptError
from triforce_cli.input.encoding import decode

GERMAN = "Über den König, dem König – “naïve”. Es war einmal ein süßes Mädchen, das hatte jeder lieb. "
RUSSIAN = "Мой дядя самых честных правил, когда не в шутку занемог, он уважать себя заставил. "
JAPANESE = "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_utf_is_read_as_it_is(encoding):
    assert decode("Über\r\nden\rKönig".encode(encoding), "a.txt", pytest.fail) == "Über\nden\nKönig"


@pytest.mark.parametrize(
    ("text", "encoding", "named"),
    [
        (GERMAN, "cp1252", "cp1252"),
        ("Příliš žluťoučký kůň úpěl ďábelské ódy. Zažloutlý. " * 3, "cp1250", "cp1250"),
        (RUSSIAN, "cp1251", "cp1251"),
        (RUSSIAN, "koi8-r", "koi8_r"),
        (JAPANESE, "shift_jis", "cp932"),
        (GERMAN, "utf-16-le", "utf_16_le"),
    ],
)
def test_others_are_guessed_with_a_warning(text, encoding, named):
    warnings = []
    assert decode(text.encode(encoding), "a.txt", warnings.append) == text
    assert warnings == [f"a.txt is not UTF-8; read as {named}, the best guess; iconv converts it from another"]


@pytest.mark.parametrize("cut", [slice(None, -1), slice(1, None), slice(1, -1)])
def test_utf_8_that_was_cut_within_a_character_is_read_with_a_warning(cut):
    warnings = []
    text = decode((JAPANESE * 2).encode()[cut], "a.txt", warnings.append)
    assert JAPANESE[1:-1] in text and "\ufffd" in text
    assert warnings[0].startswith("a.txt is UTF-8 with ") and "read as U+FFFD" in warnings[0]


@pytest.mark.parametrize(
    "data", [b"\x89PNG\r\n\x1a\n\0\0", b"\x1f\x8b\x08\x00abc\xff\xfe", bytes(range(256)) * 20, b"text \0 and more"]
)
def test_what_is_no_text_is_refused(data):
    with pytest.raises(PromptError, match=r"^a.bin is (not text|binary)"):
        decode(data, "a.bin", pytest.fail)
