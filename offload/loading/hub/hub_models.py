"""Where well-known models are published, and under which licences."""

from __future__ import annotations

from dataclasses import dataclass

EMBEDDED_KNOWN = {"SmolLM2-135M": "smollm2-135m"}  # well-known models that come embedded


@dataclass(frozen=True, slots=True)
class HubModel:
    """Where a well-known model is published. `note` has its licence, and what its hub asks for before a download."""

    id: str
    note: str


_APACHE, _MIT = "Apache 2.0", "MIT"
_GATED = "Llama {} Community License; gated: accept it on the model's page, then `hf auth login`"
_MISTRAL = "Apache 2.0; the hub may ask for contact details"
_LLAMA_3_1, _LLAMA_3_2, _LLAMA_3_3 = (_GATED.format(version) for version in ("3.1", "3.2", "3.3"))
_GEMMA = "Gemma Terms of Use; gated: accept them on the model's page, then `hf auth login`"
_PICKLED = "; pickled weights, which `triforce pull` converts once"
_LLAMA_2 = f"Llama 2 Community License{_PICKLED}"
_ONLY_PLANNED = "Apache 2.0; for plans alone: its architecture does not run here"
HUB_MODELS = {
    "Llama-2-7B": HubModel("meta-llama/Llama-2-7b-hf", _GATED.format("2")),
    "Llama-2-7B-128K": HubModel("NousResearch/Yarn-Llama-2-7b-128k", _LLAMA_2),
    "Llama-2-13B": HubModel("meta-llama/Llama-2-13b-hf", _GATED.format("2")),
    "Llama-2-13B-128K": HubModel("NousResearch/Yarn-Llama-2-13b-128k", _LLAMA_2),
    "Llama-2-22B": HubModel("chargoddard/llama2-22b", _LLAMA_2),
    "Llama-2-70B": HubModel("meta-llama/Llama-2-70b-chat-hf", _GATED.format("2")),
    "LWM-Text-Chat-128K": HubModel("LargeWorldModel/LWM-Text-Chat-128K", _LLAMA_2),
    "LWM-Text-Chat-1M": HubModel("LargeWorldModel/LWM-Text-Chat-1M", _LLAMA_2),
    "Vicuna-33B": HubModel("lmsys/vicuna-33b-v1.3", f"LLaMA's licence, not for commercial use{_PICKLED}"),
    "TinyLlama-1.1B": HubModel("TinyLlama/TinyLlama-1.1B-Chat-v1.0", _APACHE),
    "Sheared-LLaMA-1.3B": HubModel("princeton-nlp/Sheared-LLaMA-1.3B", f"{_APACHE}{_PICKLED}"),
    "InternLM-7B": HubModel("internlm/internlm-7b", _ONLY_PLANNED),
    "InternLM-20B": HubModel("internlm/internlm-20b", _ONLY_PLANNED),
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
