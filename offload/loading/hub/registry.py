"""The registry of model names: embedded, well-known, hub ids, folders and GGUF files, the same for every command.

HUB_MODELS says where well-known models are published, and under which licences.
Resolving a name reads no file of the model and asks no server. Imports no torch.
"""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from ...architecture.known_models import KNOWN, known_name, simplified
from ...errors import ModelNotFound, TriforceError
from .bundled import EMBEDDED

EMBEDDED_KNOWN = {"SmolLM2-135M": "smollm2-135m"}  # well-known models that come embedded


@dataclass(frozen=True, slots=True)
class HubModel:
    """Where a well-known model is published. `note` has its licence, and what its hub asks for before a download."""

    id: str
    note: str


_APACHE, _MIT = "Apache 2.0", "MIT"
_LLAMA_2 = "Llama 2 Community License; pickled weights, which `triforce pull` converts once"
_GATED = "Llama {} Community License; gated: accept it on the model's page, then `hf auth login`"
_MISTRAL = "Apache 2.0; the hub may ask for contact details"
_LLAMA_3_1, _LLAMA_3_2, _LLAMA_3_3 = (_GATED.format(version) for version in ("3.1", "3.2", "3.3"))
_GEMMA = "Gemma Terms of Use; gated: accept them on the model's page, then `hf auth login`"
HUB_MODELS = {
    "Llama-2-7B-128K": HubModel("NousResearch/Yarn-Llama-2-7b-128k", _LLAMA_2),
    "Llama-2-13B-128K": HubModel("NousResearch/Yarn-Llama-2-13b-128k", _LLAMA_2),
    "Llama-2-70B": HubModel("meta-llama/Llama-2-70b-chat-hf", _GATED.format("2")),
    "LWM-Text-Chat-128K": HubModel("LargeWorldModel/LWM-Text-Chat-128K", _LLAMA_2),
    "LWM-Text-Chat-1M": HubModel("LargeWorldModel/LWM-Text-Chat-1M", _LLAMA_2),
    "Llama-3.1-8B": HubModel("meta-llama/Llama-3.1-8B-Instruct", _LLAMA_3_1),
    "Llama-3.1-70B": HubModel("meta-llama/Llama-3.1-70B-Instruct", _LLAMA_3_1),
    "Llama-3.2-1B": HubModel("meta-llama/Llama-3.2-1B-Instruct", _LLAMA_3_2),
    "Llama-3.2-3B": HubModel("meta-llama/Llama-3.2-3B-Instruct", _LLAMA_3_2),
    "Llama-3.3-70B": HubModel("meta-llama/Llama-3.3-70B-Instruct", _LLAMA_3_3),
    "Qwen2.5-0.5B": HubModel("Qwen/Qwen2.5-0.5B-Instruct", _APACHE),
    "Qwen2.5-1.5B": HubModel("Qwen/Qwen2.5-1.5B-Instruct", _APACHE),
    "Qwen2.5-3B": HubModel("Qwen/Qwen2.5-3B-Instruct", "Qwen Research License"),
    "Qwen2.5-7B": HubModel("Qwen/Qwen2.5-7B-Instruct", _APACHE),
    "Qwen2.5-14B": HubModel("Qwen/Qwen2.5-14B-Instruct", _APACHE),
    "Qwen2.5-32B": HubModel("Qwen/Qwen2.5-32B-Instruct", _APACHE),
    "Qwen2.5-72B": HubModel("Qwen/Qwen2.5-72B-Instruct", "Qwen License"),
    "Qwen2.5-7B-1M": HubModel("Qwen/Qwen2.5-7B-Instruct-1M", _APACHE),
    "Qwen2.5-14B-1M": HubModel("Qwen/Qwen2.5-14B-Instruct-1M", _APACHE),
    "DeepSeek-R1-Distill-Qwen-1.5B": HubModel("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", _MIT),
    "DeepSeek-R1-Distill-Qwen-7B": HubModel("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", _MIT),
    "DeepSeek-R1-Distill-Qwen-14B": HubModel("deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", _MIT),
    "DeepSeek-R1-Distill-Qwen-32B": HubModel("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", _MIT),
    "DeepSeek-R1-Distill-Llama-8B": HubModel(
        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B", f"{_MIT}; its base has the Llama 3.1 Community License"
    ),
    "DeepSeek-R1-Distill-Llama-70B": HubModel(
        "deepseek-ai/DeepSeek-R1-Distill-Llama-70B", f"{_MIT}; its base has the Llama 3.3 Community License"
    ),
    "Qwen3-0.6B": HubModel("Qwen/Qwen3-0.6B", _APACHE),
    "Qwen3-1.7B": HubModel("Qwen/Qwen3-1.7B", _APACHE),
    "Qwen3-4B": HubModel("Qwen/Qwen3-4B", _APACHE),
    "Qwen3-4B-2507": HubModel("Qwen/Qwen3-4B-Instruct-2507", _APACHE),
    "Qwen3-8B": HubModel("Qwen/Qwen3-8B", _APACHE),
    "Qwen3-14B": HubModel("Qwen/Qwen3-14B", _APACHE),
    "Qwen3-32B": HubModel("Qwen/Qwen3-32B", _APACHE),
    "Qwen3-30B-A3B": HubModel("Qwen/Qwen3-30B-A3B", _APACHE),
    "Qwen3-235B-A22B": HubModel("Qwen/Qwen3-235B-A22B", _APACHE),
    "Qwen3-Next-80B-A3B": HubModel("Qwen/Qwen3-Next-80B-A3B-Instruct", _APACHE),
    "Mixtral-8x7B": HubModel("mistralai/Mixtral-8x7B-Instruct-v0.1", _MISTRAL),
    "Phi-4": HubModel("microsoft/phi-4", _MIT),
    "Phi-4-mini": HubModel("microsoft/Phi-4-mini-instruct", _MIT),
    "Gemma-3-270M": HubModel("google/gemma-3-270m-it", _GEMMA),
    "Gemma-3-1B": HubModel("google/gemma-3-1b-it", _GEMMA),
    "Gemma-3-4B": HubModel("google/gemma-3-4b-it", _GEMMA),
    "Gemma-3-12B": HubModel("google/gemma-3-12b-it", _GEMMA),
    "Gemma-3-27B": HubModel("google/gemma-3-27b-it", _GEMMA),
    "gpt-oss-20b": HubModel("openai/gpt-oss-20b", _APACHE),
    "gpt-oss-120b": HubModel("openai/gpt-oss-120b", _APACHE),
    "Mistral-7B": HubModel("mistralai/Mistral-7B-Instruct-v0.3", _MISTRAL),
    "Mistral-Nemo": HubModel("mistralai/Mistral-Nemo-Instruct-2407", _MISTRAL),
    "Mistral-Small-24B": HubModel("mistralai/Mistral-Small-24B-Instruct-2501", _MISTRAL),
    "Mistral-Small-3.1-24B": HubModel("mistralai/Mistral-Small-3.1-24B-Instruct-2503", _MISTRAL),
    "GLM-4-9B-0414": HubModel("zai-org/GLM-4-9B-0414", _MIT),
    "GLM-4-32B-0414": HubModel("zai-org/GLM-4-32B-0414", _MIT),
    "SmolLM3-3B": HubModel("HuggingFaceTB/SmolLM3-3B", _APACHE),
    "Granite-3.3-2B": HubModel("ibm-granite/granite-3.3-2b-instruct", _APACHE),
    "Granite-3.3-8B": HubModel("ibm-granite/granite-3.3-8b-instruct", _APACHE),
    "Yi-6B-200K": HubModel("01-ai/Yi-6B-200K", _APACHE),
    "Yi-34B-200K": HubModel("01-ai/Yi-34B-200K", _APACHE),
    "Llama-68M": HubModel("JackFram/llama-68m", _APACHE),
}


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_LONGEST_HUB_ID = 96
EVERY_FORM = (
    "--model takes a name (`triforce pull --list` lists all), a hub id such as Qwen/Qwen3-0.6B, a folder, "
    "or a .gguf file"
)
_MOST_SUGGESTED = 3
_VARIANT = re.compile(r"(instruct|chat|it)$")  # written behind a name by publishers


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The source that a model's name resolves to.

    Args:
        kind: "embedded", "path" or "hub".
        target: the embedded model's name, the path as it was given, or the hub id.
        known: the well-known model that it is, whose dimensions need no file; None for others.
        note: licence and access of a well-known model.
    """

    kind: str
    target: str
    known: str | None = None
    note: str = ""


def resolve(name: str) -> ModelSource:
    """Return what the user's name for a model stands for; an existing path comes before a well-known name.

    Raises ModelNotFound, with close names in the hint.
    """
    if not name:
        raise ModelNotFound("the model's name is empty", EVERY_FORM)
    if name in EMBEDDED:
        known = next((known for known, embedded in EMBEDDED_KNOWN.items() if embedded == name), None)
        return ModelSource("embedded", name, known)
    path = as_path(name)
    if path.exists():
        return ModelSource("path", str(path))
    if path.suffix != ".gguf":
        if (source := _well_known(name)) is not None:
            return source
        if is_hub_id(name):
            return ModelSource("hub", name, known_name(name), _note_of(name))
    raise ModelNotFound(f"no model at {name[:80]}", did_you_mean(name) + EVERY_FORM)


def is_hub_id(name: str) -> bool:
    """Return whether the hub accepts a name as `owner/model`; others would be an error of its library."""
    parts = name.split("/")
    if not HUB_ID.fullmatch(name) or len(name) > _LONGEST_HUB_ID or name.endswith(".git"):
        return False
    return not any(part[0] in "-." or part[-1] in "-." or "--" in part or ".." in part for part in parts)


def draft_error(error: TriforceError) -> TriforceError:
    """Return an error about a model as one about the draft model."""
    return type(error)(f"the draft model: {error.message}", error.hint.replace("--model", "--draft"))


def as_path(name: str) -> Path:
    """Return a name as a path, existing or not. Raises ModelNotFound for what cannot be one."""
    try:
        path = Path(name).expanduser()
        path.exists()
        return path
    except (OSError, RuntimeError, ValueError) as error:  # no such user, too long a name, no permission
        raise ModelNotFound(f"{name[:80]} is no usable path: {error}", EVERY_FORM) from error


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


def _note_of(hub_id: str) -> str:
    return next((model.note for model in HUB_MODELS.values() if model.id.lower() == hub_id.lower()), "")
