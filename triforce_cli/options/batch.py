"""`generate --batch`: what it cannot be combined with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offload.errors import SettingsError


def check_batch_flags(params: Mapping[str, Any]) -> None:
    """Raise SettingsError for flags that only a batch takes, or only a single prompt."""
    if params["batch"] is None:
        if params["parallel"] is not None:
            raise SettingsError("--parallel goes with --batch", "a single prompt runs alone; or give --batch FILE")
        return
    if params["prompt"] is not None or params["prompt_file"]:
        given = "--prompt-file" if params["prompt_file"] else "the prompt argument"
        raise SettingsError(f"--batch has its prompts in a file, and {given} gives another", "leave one of the two out")
    if params["encoding"] is not None:
        raise SettingsError("--encoding is that of text files, and the lines of --batch are UTF-8", "leave it out")
    if params["verify"]:
        raise SettingsError(
            "--verify compares a single text with plain decoding, and --batch has many",
            "leave --verify out; or check one of the prompts by itself, with the --seed of its result",
        )
