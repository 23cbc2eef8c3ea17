"""The registry of model names: embedded, well-known, hub ids, folders and GGUF files, the same for every command.

HUB_MODELS says where well-known models are published, and under which licences.
Resolving a name reads no file of the model and asks no server. Imports no torch.
"""

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

    @property
    def is_for_plans(self) -> bool:
        """Return whether only its dimensions are known here: nothing computes its architecture."""
        return _PLANS in self.note


_GATED = "Llama {} Community License; gated: accept it on the model's page, then `hf auth login`"
_PLANS = "for plans alone"
_PICKLED = "; pickled weights, which `triforce pull` converts once"
_PUBLISHED = {  # licence, and what the hub asks for before a download -> hub ids
    f"Llama 2 Community License{_PICKLED}": (
        "NousResearch/Yarn-Llama-2-7b-128k NousResearch/Yarn-Llama-2-13b-128k LargeWorldModel/LWM-Text-Chat-128K "
        "LargeWorldModel/LWM-Text-Chat-1M chargoddard/llama2-22b"
    ),
    _GATED.format("2"): "meta-llama/Llama-2-7b-hf meta-llama/Llama-2-13b-hf meta-llama/Llama-2-70b-chat-hf",
    f"LLaMA's licence, not for commercial use{_PICKLED}": "lmsys/vicuna-33b-v1.3",
    _GATED.format("3.1"): "meta-llama/Llama-3.1-8B-Instruct meta-llama/Llama-3.1-70B-Instruct",
    _GATED.format("3.2"): "meta-llama/Llama-3.2-1B-Instruct meta-llama/Llama-3.2-3B-Instruct",
    _GATED.format("3.3"): "meta-llama/Llama-3.3-70B-Instruct",
    "Apache 2.0": (
        "Qwen/Qwen2.5-0.5B-Instruct Qwen/Qwen2.5-1.5B-Instruct Qwen/Qwen2.5-7B-Instruct Qwen/Qwen2.5-14B-Instruct "
        "Qwen/Qwen2.5-32B-Instruct Qwen/Qwen2.5-7B-Instruct-1M Qwen/Qwen2.5-14B-Instruct-1M Qwen/Qwen3-0.6B "
        "Qwen/Qwen3-1.7B Qwen/Qwen3-4B Qwen/Qwen3-4B-Instruct-2507 Qwen/Qwen3-8B Qwen/Qwen3-14B Qwen/Qwen3-32B "
        "Qwen/Qwen3-30B-A3B Qwen/Qwen3-235B-A22B Qwen/Qwen3-Next-80B-A3B-Instruct openai/gpt-oss-20b "
        "openai/gpt-oss-120b HuggingFaceTB/SmolLM3-3B ibm-granite/granite-3.3-2b-instruct "
        "ibm-granite/granite-3.3-8b-instruct 01-ai/Yi-6B-200K 01-ai/Yi-34B-200K JackFram/llama-68m "
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0"
    ),
    f"Apache 2.0{_PICKLED}": "princeton-nlp/Sheared-LLaMA-1.3B",
    f"Apache 2.0; {_PLANS}: its architecture does not run here": "internlm/internlm-7b internlm/internlm-20b",
    "Qwen Research License": "Qwen/Qwen2.5-3B-Instruct",
    "Qwen License": "Qwen/Qwen2.5-72B-Instruct",
    "MIT": (
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B deepseek-ai/DeepSeek-R1-Distill-Qwen-7B "
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B deepseek-ai/DeepSeek-R1-Distill-Qwen-32B "
        "microsoft/phi-4 microsoft/Phi-4-mini-instruct zai-org/GLM-4-9B-0414 zai-org/GLM-4-32B-0414"
    ),
    "MIT; its base has the Llama 3.1 Community License": "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
    "MIT; its base has the Llama 3.3 Community License": "deepseek-ai/DeepSeek-R1-Distill-Llama-70B",
    "Apache 2.0; the hub may ask for contact details": (
        "mistralai/Mixtral-8x7B-Instruct-v0.1 mistralai/Mistral-7B-Instruct-v0.3 mistralai/Mistral-Nemo-Instruct-2407 "
        "mistralai/Mistral-Small-24B-Instruct-2501 mistralai/Mistral-Small-3.1-24B-Instruct-2503"
    ),
    "Gemma Terms of Use; gated: accept them on the model's page, then `hf auth login`": (
        "google/gemma-3-270m-it google/gemma-3-1b-it google/gemma-3-4b-it google/gemma-3-12b-it google/gemma-3-27b-it"
    ),
}
_BY_NAME = {known_name(each): HubModel(each, note) for note, ids in _PUBLISHED.items() for each in ids.split()}
HUB_MODELS = {name: _BY_NAME[name] for name in KNOWN if name in _BY_NAME}

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
            notes = (model.note for model in HUB_MODELS.values() if model.id.lower() == name.lower())
            return ModelSource("hub", name, known_name(name), next(notes, ""))
    raise ModelNotFound(f"no model at {name[:80]}", did_you_mean(name) + EVERY_FORM)


def is_hub_id(name: str) -> bool:
    """Return whether the hub accepts a name as `owner/model`; others would be an error of its library."""
    parts = name.split("/")
    if not HUB_ID.fullmatch(name) or len(name) > _LONGEST_HUB_ID or name.endswith(".git"):
        return False
    return not any(part[0] in "-." or part[-1] in "-." or "--" in part or ".." in part for part in parts)


def draft_error(error: TriforceError) -> TriforceError:
    """Return an error about a model as one about the draft model."""
    hint = error.hint.replace("--model takes a name", "--draft takes lookup, none, self, mtp, a name")
    return type(error)(f"the draft model: {error.message}", hint.replace("--model", "--draft"))


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
