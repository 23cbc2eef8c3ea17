"""`triforce serve`: an OpenAI-compatible HTTP endpoint over one loaded model. Needs the extra `serve`."""
