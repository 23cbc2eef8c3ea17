"""Guesses the encoding of a text that is not UTF-8 and has no byte order mark."""

import re

# Never right for a document whose bytes are not UTF-8 and hold no NUL, or so rare that they are wrong when guessed.
_NOT_GUESSED = ["utf_7", "utf_16", "utf_16_le", "utf_16_be", "utf_32", "utf_32_le", "utf_32_be", "hp_roman8", "cp1006"]
_HEAD = 20  # lines always given to the detector: they may declare the encoding
_CHAOS, _COHERENCE = 0.01, 0.1  # charset-normalizer's scores this close are a draw

# Western text: its accented letters, and what else it has above ASCII. Letters of Icelandic, and those that cp1252 has
# for other languages, are left out: they are likelier to be the wrong reading of a code page for Turkish or Czech.
_LETTERS = "À-ÏÑ-ÖØ-Üà-ïñ-öø-üÿßŒœ"
_QUOTES = "“”„‘’«»‹›–—…¿¡\xa0"  # may stand next to any letter
_SIGNS = "‚•€£§©®™°·ªº½¼¾²³´×\xad"
_NOT_WESTERN = re.compile(
    rf"""
    [^\x00-\x7f{_LETTERS}{_QUOTES}{_SIGNS}]   # no character of Western text
    | [\x01-\x08\x0e-\x1a\x1c-\x1f\x7f]       # control characters
    | [{_LETTERS}]{{3}}                       # words of Cyrillic, Greek or Chinese
    | [a-zà-öø-ü][À-ÖØ-ÜŒ]                    # capitals inside words: letters and quotes of Mac Roman or DOS
    | [ìù][a-z{_LETTERS}]                     # Czech: these end a word in Italian and French
    | [a-zA-Z{_LETTERS}][‚„¿¡•€£§©¼½¾²³´×][a-z{_LETTERS}]  # Polish, DOS
    | [{_SIGNS}][{_LETTERS}] | [{_LETTERS}][‚•€£©®§°ªº½¼¾²³´×]  # East Asian pairs
    """,
    re.VERBOSE,
)
_LETTER = re.compile(r"[^\W\d_]")
_MOST_ACCENTED, _LONG = 0.3, 200  # share of a text's letters; 2/3 of it in one with more letters than this
_SPACES = re.compile(r"[\s\xad\u200b-\u200f\u202a-\u202e\u2060\ufeff]+")
_ASCII = bytes([9, 10, 13, *range(32, 127)])
_LEAST_NULS, _MOST_ASCII = 0.4, 0.85  # shares of UTF-16: of Western text, and of other scripts
_UNITS = 4  # of UTF-16 or UTF-32: what is shorter is no evidence


def guess(data: bytes) -> str | None:
    """Return the most likely encoding of bytes that are not UTF-8, or None where they are likely no text.

    Western text is recognised by its letters; the rest is charset-normalizer's best guess.
    """
    if b"\0" in data:
        return _wide(data)
    for encoding in ("cp1252", "mac_roman"):
        text = _decoded(data, encoding)
        if text is not None and _is_western(text):
            return encoding
    return _detected(data)


def _wide(data: bytes) -> str | None:
    """Return the kind of UTF-16 or UTF-32 without a byte order mark; None for other bytes with NULs."""
    ascii = len(data) - len(data.translate(None, _ASCII))
    nuls = data.count(b"\0")
    if nuls < _LEAST_NULS * len(data) and ascii > _MOST_ASCII * (len(data) - nuls):
        return None  # a text of single bytes with a few NULs
    # The high bytes of a script's characters vary less than their low ones.
    first, second = len(set(data[::2])), len(set(data[1::2]))
    wide = ("utf-16-be", "utf-16-le") if first < second else ("utf-16-le", "utf-16-be")
    for encoding in ("utf-32-le", "utf-32-be", *wide):
        text = _decoded(data, encoding)
        if text is not None and len(text) >= _UNITS and _SPACES.sub("", text).isprintable():
            return encoding
    return None


def _is_western(text: str) -> bool:
    """Return whether a text, decoded as a Western encoding, has accents and signs only where such text has them."""
    if _NOT_WESTERN.search(text):
        return False
    letters = len(_LETTER.findall(text))
    accented = len(re.findall(f"[{_LETTERS}]", text))
    return accented <= (_MOST_ACCENTED if letters < _LONG else _MOST_ACCENTED * 2 / 3) * letters


def _detected(data: bytes) -> str | None:
    """Return charset-normalizer's best guess, or None; a draw with cp1252, by far the commonest, goes to cp1252.

    Western text uses so few bytes above ASCII that many code pages fit it equally well.
    """
    from charset_normalizer import from_bytes  # slow to import, seldom needed

    # The detector takes a few samples of a long text, in which lines of pure ASCII are no evidence. All encodings that
    # are guessed use the same byte for a newline.
    lines = data.split(b"\n")
    sample = b"\n".join(line for number, line in enumerate(lines) if number < _HEAD or not line.isascii())
    matches = [m for m in from_bytes(sample, cp_exclusion=_NOT_GUESSED) if _decoded(data, m.encoding) is not None]
    if not matches:
        return None
    best = matches[0]
    western = from_bytes(sample, cp_isolation=["cp1252"]).best()
    if western is not None and _decoded(data, "cp1252") is not None:
        same = str(western) == str(best)
        draw = western.chaos <= best.chaos + _CHAOS and western.coherence >= best.coherence - _COHERENCE
        if same or draw:
            return "cp1252"
    return best.encoding


def _decoded(data: bytes, encoding: str) -> str | None:
    try:
        text = data.decode(encoding)
        text.encode("utf-8")  # refuses lone surrogates
    except UnicodeError:
        return None
    return text
