"""What `summarize` is asked for. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..input.documents import Document
from ..input.excerpts import Range
from .instructions import Wanted
from .templates import Templates


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be said about which documents. No `questions` ask for a summary; `range` is what to take of each."""

    documents: Sequence[Document]
    questions: Sequence[str]
    wanted: Wanted
    templates: Templates
    range: Range
    together: bool = False
    map_reduce: bool = False
