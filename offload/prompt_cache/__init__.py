"""Prompt caches: the keys and values of prompts on disk, so that a document is read once and not once a question.

A prompt is cut into blocks of tokens. A block's name is a hash over everything before it, so whatever prompts have in
common from their beginning on is kept, and found, once.

`cache.py` is the way in for those who generate; `folder.py` and `entries.py`, which need no torch, for those who keep
house.
"""
