"""Ranks that wait for work, and the models that they share."""

import pytest

from tests.support.models import VARIANTS, make_hf_model, make_tokenizer
from tests.support.rank_pool import Crew


@pytest.fixture(scope="session", params=[2, pytest.param(3, marks=[pytest.mark.slow, pytest.mark.long])])
def crew(request):
    crew = Crew(request.param)
    yield crew
    crew.close()


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Every model, and a draft."""
    found = {}
    for name, (family, changes) in {**VARIANTS, "draft": ("llama", {"num_hidden_layers": 1})}.items():
        found[name] = tmp_path_factory.mktemp(name)
        make_hf_model(family, seed=len(found), **changes).save_pretrained(found[name])
        make_tokenizer().save_pretrained(found[name])
    return {name: str(folder) for name, folder in found.items()}
