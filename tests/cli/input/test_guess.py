"""Which encodings are recognised, at which lengths: real texts, from a line to a book."""

import pytest

from offload.errors import PromptError, SettingsError
from tests.support.command import refused
from triforce_cli.input.encoding import decode, encoding_named

GERMAN = (
    "Für die Größe der Bücher gibt es keine Regel. Der alte Müller ging über die Brücke und hörte die Vögel, die früh "
    "in den Bäumen saßen. „Schön“, sagte er, „daß ich noch höre – und daß es blüht.“ Dann öffnete er die Tür. "
)
FRENCH = (
    "Les élèves ont été très heureux de découvrir la forêt où naît le fleuve. « C’est là-bas, à côté du château », "
    "répéta le garçon ; et l’hôtesse, inquiète, ferma la fenêtre. Ça n’a pas gêné le chœur, qui chantait déjà. "
)
SPANISH = (
    "El niño soñó que volaba. ¿Quién lo creería? ¡Nadie! Después de la lección, el señor Muñoz abrió la ventana, y el "
    "corazón de la montaña se veía más allá del río. Según él, también había árboles más jóvenes. "
)
ENGLISH = (
    "“I don’t know,” she said, “whether the café is open—the façade looked dark.” It wasn’t; the fiancée’s résumé lay "
    "on the table, and nobody had read it. The naïve reader of this page may well ask why it should cost £5. "
)
RUSSIAN = (
    "Все люди рождаются свободными и равными в своём достоинстве и правах. Они наделены разумом и совестью и должны "
    "поступать в отношении друг друга в духе братства. Старик вышел из дома рано утром, когда город ещё спал. "
)
JAPANESE = (
    "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。何でも薄暗いじめじめした所で"
    "ニャーニャー泣いていた事だけは記憶している。吾輩はここで始めて人間というものを見た。\n"
)
CHINESE = (
    "人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心，并应以兄弟关系的精神相对待。"
    "今天天气很好，老人一早就出了门，沿着河边慢慢地走，看见孩子们在树下读书。\n"
)
WESTERN = (GERMAN, FRENCH, SPANISH, ENGLISH)
MORE = (1000, 100_000)  # bytes
# Texts, their encoding, and the fewest bytes from which they are recognised. Shorter ones may be read as another one:
# a few letters above ASCII fit many code pages. --encoding is for them.
KNOWN = [
    (WESTERN, "cp1252", 40),
    ((FRENCH, GERMAN), "latin-1", 40),
    (WESTERN, "mac_roman", 40),
    ((*WESTERN, RUSSIAN, CHINESE), "utf-16-le", 40),
    ((*WESTERN, RUSSIAN, CHINESE), "utf-16-be", 40),
    ((JAPANESE,), "utf-16-le", 300),  # its bytes hold no NUL before the first newline
    ((JAPANESE,), "utf-16-be", 300),
    ((*WESTERN, RUSSIAN, JAPANESE, CHINESE), "utf-16", 40),
    ((GERMAN, CHINESE), "utf-32-le", 40),
    ((JAPANESE,), "shift_jis", 100),
    ((CHINESE,), "gb18030", 100),
    ((RUSSIAN,), "koi8_r", 100),
    ((RUSSIAN,), "cp1251", 100),
]
CASES = [(text, encoding, size) for texts, encoding, least in KNOWN for text in texts for size in (least, *MORE)]


def cut(text, encoding, size):
    """The beginning of a text, repeated, as far as it fits into so many bytes; in latin-1 without typography."""
    if encoding == "latin-1":
        text = text.translate(str.maketrans({"„": '"', "“": '"', "–": "-", "’": "'", "œ": "oe"}))
    part = text * (1 + size // len(text.encode(encoding)))
    while len(part.encode(encoding)) > size:
        over = len(part.encode(encoding)) - size
        part = part[: -max(1, over // 4)]
    return part


@pytest.mark.parametrize(("text", "encoding", "size"), CASES)
def test_real_texts_are_recognised(text, encoding, size):
    part, warnings = cut(text, encoding, size), []
    assert decode(part.encode(encoding), "book.txt", warnings.append) == part
    assert len(warnings) == (encoding != "utf-16")  # whose byte order mark names it


@pytest.mark.parametrize(
    "data", [b"\x7fELF\2\1\1" + bytes(60), bytes(range(256)) * 9, b"a\0b\0", b"plain\0text", bytes(40)]
)
def test_other_bytes_with_nuls_are_binary(data):
    with pytest.raises(PromptError, match="binary"):
        decode(data, "file", pytest.fail)


def test_a_named_encoding_is_not_guessed(tmp_path):
    book = tmp_path / "book.txt"
    book.write_bytes("Příliš žluťoučký kůň".encode("cp1250"))
    assert decode(book.read_bytes(), "book", pytest.fail, encoding_named("Windows-1250")) == "Příliš žluťoučký kůň"
    assert decode("\ufeffa".encode(), "book", pytest.fail, "utf-8") == "a"
    with pytest.raises(PromptError, match="not valid utf-8 at byte 1"):
        decode(b"a\xe9b", "book", pytest.fail, "utf-8")
    with pytest.raises(PromptError, match="NUL"):
        decode(b"a\0b", "book", pytest.fail, "cp1252")


@pytest.mark.parametrize(
    ("name", "near"), [("cp1225", "cp125"), ("shiftjis2", "shift_jis"), ("base64", "b"), ("\0", "")]
)
def test_a_name_of_no_encoding_lists_the_nearest(name, near):
    with pytest.raises(SettingsError, match="is no encoding") as caught:
        encoding_named(name)
    assert near in caught.value.hint and "utf-8" in caught.value.hint


@pytest.mark.parametrize("command", ["generate", "summarize", "chat", "bench"])
def test_each_command_that_reads_files_takes_the_encoding(triforce, tmp_path, command):
    book = tmp_path / "book.txt"
    book.write_bytes(b"caf\xe9")
    refused(triforce(command, "-f", str(book), "--encoding", "utf-8"), "not valid utf-8 at byte 3", "--encoding")
    refused(triforce(command, "-f", str(book), "--encoding", "latin1x"), "is no encoding", "did you mean latin1")
