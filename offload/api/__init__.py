"""The library's face: models opened by name, questions asked, answers streamed."""
