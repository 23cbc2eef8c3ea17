"""States of layers with linear attention, saved with some blocks of a prompt: those behind the block's last token.

They take as much as the keys and values of many tokens, so they are saved with every sixteenth block and with the last
one of a prompt. Their file is a further part of the block. A prompt is restored up to a block with states.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from .block import read_block
from .chain import Prompt

PART = "states"  # in the name of their files, and in the headers
EVERY = 16  # blocks


def path_of(prompt: Prompt, index: int) -> Path:
    """Return the file of the states behind a block."""
    return prompt.folder.block(prompt.fingerprint, index, prompt.keys[index], PART)


def are_wanted(index: int, end: int) -> bool:
    """Return whether states are saved with a block of a prompt whose blocks before number `end` are saved."""
    return (index + 1) % EVERY == 0 or index + 1 == end


def last_with_states(prompt: Prompt, first: int, last: int, unit: int) -> int:
    """Return the end of the last block from `first` on and before `last` that has states; `first` if there is none.

    Only multiples of `unit` blocks count.
    """
    ends = range(last // unit * unit, first, -unit)
    return next((end for end in ends if path_of(prompt, end - 1).exists()), first)


def read_states(prompt: Prompt, index: int) -> Tensor:
    """Return the states behind a block, as `States.dump` did. Raises FileNotFoundError, UnusableBlock."""
    return read_block(path_of(prompt, index), prompt.keys[index], prompt.ids(index), PART)[0]
