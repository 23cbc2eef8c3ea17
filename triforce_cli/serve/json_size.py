"""Bounds what the JSON of a request is made of, before a parser makes objects of it: they take far more than the text.

Parsing holds Python's lock, so that no other request is answered meanwhile; counting does not.
"""

from __future__ import annotations

import numpy as np

from .errors import ApiError

MOST_PARTS = 1 << 16  # lists, objects and their fields: the messages of a chat have some 30,000 at most
_PIECE = 1 << 20  # bytes that are counted at a time
_QUOTE, _COMMA, _COLON, _LIST, _OBJECT = b'",:[{'


def check_json(data: bytes | bytearray, most_items: int) -> None:
    """Raise ApiError for more than `most_items` commas, or MOST_PARTS lists, objects and fields, outside of texts.

    What is no valid JSON may be counted in any way.
    """
    parts = items = 0
    is_text, start = False, 0
    while start < len(data):
        piece = data[start : start + _PIECE]
        escapes = len(piece) - len(piece.rstrip(b"\\"))
        if escapes % 2:  # what the last one escapes belongs to it
            piece = data[start : start + _PIECE + 1]
        start += len(piece)
        codes = np.frombuffer(piece.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
        texts = np.logical_xor.accumulate(codes == _QUOTE) ^ is_text  # quotes that open a text are part of it
        is_text = bool(texts[-1]) if len(texts) else is_text
        items += int(np.count_nonzero((codes == _COMMA) & ~texts))
        parts += int(np.count_nonzero(((codes == _LIST) | (codes == _OBJECT) | (codes == _COLON)) & ~texts))
        if parts > MOST_PARTS or items > most_items:
            raise ApiError(413, "the JSON of the request has too many values", "request_too_large")
