"""Where keys and values lie, and the caches that attend to them: full, retrieval, StreamingLLM."""
