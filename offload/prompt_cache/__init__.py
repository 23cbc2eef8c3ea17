"""Prompt cache: the KV of prompts on disk, so that a document is prefilled once and not once per question.

A prompt is cut into blocks of tokens. A block's key is a hash over all tokens up to its end, so a prefix that several
prompts share is stored once.

`prefill.py` is the entry point for generation. `folder.py` and `entries.py` list and remove what is stored; they import
no torch.
"""
