"""Stores for keys and values, and the caches over them: full, retrieval, StreamingLLM."""
