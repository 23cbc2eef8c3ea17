"""One endpoint for most tests: starting it takes longer than any of them."""

import json
import shutil

import pytest

from tests.support.serving import openai_client, opened_model, serve_options, serving


@pytest.fixture(scope="package")
def endless(tiny_model_dir, tmp_path_factory):
    """The tiny model, without an end-of-sequence token: its answers are as long as asked for."""
    folder = tmp_path_factory.mktemp("served") / "tiny"
    shutil.copytree(tiny_model_dir, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    (folder / "generation_config.json").unlink()
    return folder


@pytest.fixture(scope="package")
def opened(endless):
    return opened_model(endless)


@pytest.fixture(scope="package")
def loaded(opened):
    return opened.model.load()


@pytest.fixture(scope="package")
def served(opened, loaded):
    with serving(opened, loaded, serve_options()) as found:
        yield found


@pytest.fixture(scope="package")
def client(served):
    return served.client


@pytest.fixture(scope="package")
def api(served):
    return openai_client(served)
