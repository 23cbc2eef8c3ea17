"""Fixtures: a pool of ranks, and the models that they load."""

import pytest

from tests.support.models import VARIANTS, make_hf_model, make_tokenizer
from tests.support.rank_pool import RankPool


@pytest.fixture(scope="session", params=[2, pytest.param(3, marks=pytest.mark.long)])
def rank_pool(request):
    rank_pool = RankPool(request.param)
    yield rank_pool
    rank_pool.close()


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Return the folder of every model variant, and of a draft model, by name."""
    found = {}
    for name, (family, changes) in {**VARIANTS, "draft": ("llama", {"num_hidden_layers": 1})}.items():
        found[name] = tmp_path_factory.mktemp(name)
        make_hf_model(family, seed=len(found), **changes).save_pretrained(found[name])
        make_tokenizer().save_pretrained(found[name])
    return {name: str(folder) for name, folder in found.items()}
