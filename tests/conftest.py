"""Fixtures shared by the tests: a tiny model in a folder, and the embedded model where a test asks for it."""

import os
from pathlib import Path

import pytest
from tiny import make_hf_model, make_tokenizer


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory) -> Path:
    """A seeded tiny Llama with a byte-level tokenizer, as transformers saves them."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    make_hf_model("llama").save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def embedded_model_dir() -> Path:
    """The embedded model, fetched into the user's cache if it is not there yet."""
    from offload.sources import locate

    home = os.environ.get("TRIFORCE_HOME")
    return locate("smollm2-135m", Path(home) if home else None)
