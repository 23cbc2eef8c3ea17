"""The families of models that run, close relatives in one file. docs/architecture.md says how to add one."""

from .cohere import COHERE, COHERE2, STARCODER2
from .deepseek import DEEPSEEK_V3, GLM4_MOE_LITE
from .family import Family, GGUFNames
from .gemma import GEMMA2, GEMMA3
from .gemma4 import GEMMA4
from .glm4 import GLM4, GLM4_MOE
from .gpt_oss import GPT_OSS
from .granite import GRANITE, GRANITE_MOE
from .llama import ERNIE4_5, LLAMA, PHI3, SEED_OSS, SMOLLM3
from .mistral import MINISTRAL, MINISTRAL3, MISTRAL, MIXTRAL
from .olmo2 import EXAONE4, OLMO2, OLMO3, OLMOE
from .qwen import QWEN2, QWEN3, QWEN3_MOE
from .qwen3_next import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT

_DENSE = (
    LLAMA,
    MISTRAL,
    MINISTRAL3,
    QWEN2,
    QWEN3,
    SMOLLM3,
    PHI3,
    GRANITE,
    OLMO2,
    GLM4,
    STARCODER2,
    COHERE,
    SEED_OSS,
    ERNIE4_5,
)
_WINDOWED = (GEMMA2, GEMMA3, GEMMA4, OLMO3, COHERE2, MINISTRAL, EXAONE4)
_HYBRID = (QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE)
_EVERY = (
    *_DENSE,
    *_WINDOWED,
    QWEN3_MOE,
    MIXTRAL,
    GRANITE_MOE,
    OLMOE,
    GPT_OSS,
    GLM4_MOE,
    DEEPSEEK_V3,
    GLM4_MOE_LITE,
    *_HYBRID,
)
FAMILIES: dict[str, Family] = {family.name: family for family in _EVERY}  # by `model_type`
_SPARSE = {family.gguf.sparse for family in _EVERY if family.gguf is not None}
GGUF_FAMILIES = {  # by architecture; of files with experts that share it with others, those others
    family.gguf.architecture: family for family in _EVERY if family.gguf is not None and family.name not in _SPARSE
}

__all__ = ["FAMILIES", "GGUF_FAMILIES", "Family", "GGUFNames"]
