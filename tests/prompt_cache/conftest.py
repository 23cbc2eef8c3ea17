"""Machines that share a store of blocks. `url`, a fixture of each file, is where it is."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.models import ids
from tests.support.prompt_cache import LENGTH, engine_on, said

PROMPT = ids(LENGTH)


@pytest.fixture
def machine(model_dir, tmp_path, url):
    """Return a function that runs a prompt on a machine with a folder of its own: tokens, and those restored."""
    stores = []

    def run(name, prompt=PROMPT, url=url, **more):
        engine = engine_on(model_dir, tmp_path / name, store=url, **more)
        stores.append(engine.prompts.store)
        result = said(engine, prompt)
        engine.prompts.store.drain()
        return result

    yield run
    for store in stores:  # what a test has left behind would reach the store of the next one
        store._gets.wait(60)
        store._puts.wait(60)


@pytest.fixture
def run_both(machine):
    """Return a function that runs a prompt on machines a and b at once, and returns the tokens of each."""

    def run():
        with ThreadPoolExecutor(2) as threads:
            return [tokens for tokens, _ in threads.map(machine, "ab")]

    return run


@pytest.fixture(scope="session")
def plain(model_dir):
    """Return the tokens after the prompt without a prompt cache."""
    return said(engine_on(model_dir, None), PROMPT)[0]
