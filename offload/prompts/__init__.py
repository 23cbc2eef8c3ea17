"""Prompt caches: the keys and values of prompts on disk, so that a document is read once and not once a question.

A prompt is cut into blocks of tokens. A block's name is a hash over everything before it, so whatever prompts have in
common from their beginning on is kept, and found, once.
"""

from .cache import LEAST, PromptCache
from .folder import PromptFolder
from .identity import TOKENS, weights_digest

__all__ = ["LEAST", "TOKENS", "PromptCache", "PromptFolder", "weights_digest"]
