"""A model's chat template: renders it in a process of its own, with limits of memory and time.

A template is untrusted code from a checkpoint. Jinja's sandbox keeps it from the rest of the program, but neither from
endless loops nor from memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from ...system.limited_process import LimitedProcesses, LimitExceeded, Limits, Refused

Message = Mapping[str, str]
_SWITCH = "enable_thinking"  # the variable of a template
_MEMORY, _SECONDS = 160 * 2**20, 2.0  # of a template with short messages; with its program it stays below 256 MiB
_BYTES_EACH = 64  # more memory for each character of the messages: copies of up to 4 bytes
_CHARACTERS_PER_S = 4_000_000
_MOST_TEXT = 2**20  # characters that a template may add; a genuine one adds thousands


class TemplateFailed(Exception):
    """A template has raised an error or needs too much. `kind` is the name of the error's type."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class ChatTemplate:
    """A model's chat template.

    Args:
        source: a Jinja template, or several by name, of which "default" is used.
        special_tokens: variables of the template, such as `bos_token`.
    """

    def __init__(self, source: str | Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._processes = LimitedProcesses("offload.loading.tokenizers.template_rendering:render")

    @property
    def text(self) -> str:
        """The template itself; empty if there are several and none is the default."""
        return self._source if isinstance(self._source, str) else self._source.get("default", "")

    @property
    def has_switch(self) -> bool:
        """Return whether thinking can be switched on and off, as by the templates of Qwen3 and SmolLM3."""
        return _SWITCH in self.text

    def render(self, messages: Sequence[Message], think: bool | None = None) -> str:
        """Return the text of a conversation, up to the answer. `think` is the switch's value; None: its default.

        Raises TemplateFailed for what the template raises, and if it exceeds its limits; ValueError if there are
        several templates and none is the default.
        """
        variables = (
            {"messages": [dict(message) for message in messages], "tools": None, "documents": None}
            | {"add_generation_prompt": True}
            | ({} if think is None else {_SWITCH: think})
            | self._special_tokens
        )
        size = sum(len(value) for message in messages for value in message.values())
        request = {"source": self._default, "variables": variables, "most": _MOST_TEXT + 4 * size}
        data = json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass")
        limits = Limits(_MEMORY + _BYTES_EACH * size, _SECONDS + size / _CHARACTERS_PER_S)
        try:
            return self._processes.call(data, limits).decode("utf-8", "surrogatepass")
        except LimitExceeded as error:
            raise TemplateFailed(type(error).__name__, f"it {error}") from None
        except Refused as error:
            raise TemplateFailed(*json.loads(str(error))) from None

    @property
    def _default(self) -> str:
        source = self._source
        if not isinstance(source, str):
            if "default" not in source:
                raise ValueError(f"there are several chat templates and no default: {', '.join(sorted(source))}")
            source = source["default"]
        return source
