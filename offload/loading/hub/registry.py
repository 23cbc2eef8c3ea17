"""The registry of model names: embedded, well-known, hub ids, folders and GGUF files, the same for every command.

Resolving a name reads no file of the model and asks no server. Imports no torch.
"""

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from ...architecture.known_models import KNOWN, MODELS, known_name, simplified
from ...errors import ModelNotFound, TriforceError
from .bundled import EMBEDDED

EMBEDDED_KNOWN = {"SmolLM2-135M": "smollm2-135m"}  # well-known models that come embedded


@dataclass(frozen=True, slots=True)
class HubModel:
    """Where a well-known model is published. `note` has its licence, and what its hub asks for before a download."""

    id: str
    note: str

    @property
    def is_for_plans(self) -> bool:
        """Return whether the model can be planned but not run: its architecture is not implemented."""
        return "for plans alone" in self.note

    @property
    def is_free(self) -> bool:
        """Return whether the model is fetched without accepting a licence, and its weights are in safetensors."""
        return not any(word in self.note for word in ("gated", "pickled", "for plans alone"))


HUB_MODELS = {name: HubModel(each.hub_id, each.licence) for name, each in MODELS.items() if each.hub_id}

EVERY_FORM = (
    "a model is a name (`triforce models` lists all), a hub id such as Qwen/Qwen3-0.6B, a GGUF file of one such as "
    "unsloth/Qwen3-4B-GGUF:Q4_K_M, a folder, or a .gguf file"
)
_MOST_SUGGESTED = 3
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_GGUF = re.compile(r"([^/:]+/[^/:]+)[:/]([^:]+)")  # owner/model:Q4_K_M or owner/model/file.gguf
_LONGEST_HUB_ID = 96
_VARIANT = re.compile(r"(instruct|chat|it)$")  # written behind a name by publishers


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The source that a model's name resolves to.

    Args:
        kind: "embedded", "path", "hub", or "gguf" for a file of a hub repository.
        target: the embedded model's name, the path as it was given, or the hub id.
        file: of a GGUF model, its path in the repository, or its quantisation.
        known: the well-known model that it is, whose dimensions need no file; None for others.
        note: licence and access of a well-known model.
    """

    kind: str
    target: str
    known: str | None = None
    note: str = ""
    file: str = ""


def resolve(name: str) -> ModelSource:
    """Return what the user's name for a model stands for; an existing path comes before a well-known name.

    Raises ModelNotFound, with close names in the hint.
    """
    if not name:
        raise ModelNotFound("the model's name is empty", EVERY_FORM)
    if name in EMBEDDED:
        known = next((known for known, embedded in EMBEDDED_KNOWN.items() if embedded == name), None)
        return ModelSource("embedded", name, known)
    try:
        path = Path(name).expanduser()
        exists = path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # no such user, too long a name, no permission
        raise ModelNotFound(f"{name[:80]} is not a usable path: {error}", EVERY_FORM) from error
    if exists:
        return ModelSource("path", str(path))
    gguf = _HUB_GGUF.fullmatch(name)
    if gguf and is_hub_id(gguf[1]) and (":" in name or path.suffix == ".gguf"):
        return ModelSource("gguf", gguf[1], known_name(gguf[1]), file=gguf[2])
    if path.suffix != ".gguf":
        if (source := _well_known(name)) is not None:
            return source
        if is_hub_id(name):
            notes = (model.note for model in HUB_MODELS.values() if model.id.lower() == name.lower())
            return ModelSource("hub", name, known_name(name), next(notes, ""))
    raise ModelNotFound(f"no model at {name[:80]}", did_you_mean(name) + EVERY_FORM)


def is_hub_id(name: str) -> bool:
    """Return whether the hub accepts a name as `owner/model`; others would be an error of its library."""
    if not _HUB_ID.fullmatch(name) or len(name) > _LONGEST_HUB_ID or name.endswith(".git"):
        return False
    return not any(part[0] in "-." or part[-1] in "-." or "--" in part or ".." in part for part in name.split("/"))


def draft_error(error: TriforceError) -> TriforceError:
    """Return an error about a model as one about the draft model."""
    hint = error.hint.replace("a model is a name", "--draft takes lookup, none, self, mtp, a name")
    return type(error)(f"the draft model: {error.message}", hint.replace("--model", "--draft"))


def did_you_mean(name: str) -> str:
    """Return the beginning of a hint, with the closest models; empty if none is close."""
    names = {simplified(known): known for known in KNOWN} | {simplified(name): name for name in EMBEDDED}
    bare = simplified(name)
    for wanted in (bare, _VARIANT.sub("", bare)):
        if close := difflib.get_close_matches(wanted, names, 2 * _MOST_SUGGESTED):
            # A name is mistyped at its end rather than at its beginning.
            close.sort(key=lambda each: -len(os.path.commonprefix([each, bare])))  # noqa: RUF071
            return f"did you mean {', '.join(names[each] for each in close[:_MOST_SUGGESTED])}? "
    return ""


def _well_known(name: str) -> ModelSource | None:
    """Return the source of a well-known model, written without its publisher."""
    if "/" in name:
        return None
    wanted = simplified(name)
    for known in KNOWN:
        names = {simplified(known), simplified(HUB_MODELS[known].id) if known in HUB_MODELS else ""}
        if wanted in names or _VARIANT.sub("", wanted) in names:
            if known in EMBEDDED_KNOWN:
                return ModelSource("embedded", EMBEDDED_KNOWN[known], known)
            return ModelSource("hub", HUB_MODELS[known].id, known, HUB_MODELS[known].note)
    return None
