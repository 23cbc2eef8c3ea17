"""What the buffers of the prompt cache leave of a memory limit."""

from types import SimpleNamespace

import pytest

from offload.settings.config import Caching, Placement
from triforce_cli.run import prompt_cache
from triforce_cli.run.prompt_cache import memory_limit

TOKENS = 5000


@pytest.fixture(autouse=True)
def cacheable(monkeypatch):
    monkeypatch.setattr(prompt_cache, "is_cacheable", lambda settings: True)


def left(limit, need, tokens=TOKENS, device="cpu", cache=None, **placement):
    """Return what a limit leaves beside buffers of 20 bytes, for a sequence of `need` bytes."""
    model = SimpleNamespace(
        device=SimpleNamespace(type=device), prompt_buffer_bytes=20, estimate=lambda _: SimpleNamespace(total=need)
    )
    settings = SimpleNamespace(
        caching=Caching(cache=cache), placement=Placement(**placement), memory_limit=lambda kind: limit
    )
    return memory_limit(model, settings, tokens)


def test_buffers_are_counted_where_a_sequence_fits_beside_them():
    assert left(None, 80) is None
    assert (left(100, 80), left(100, 81)) == (80, 100)
    assert left(100, 80, cache=False) == left(100, 80, device="cuda") == left(100, 80, tokens=1000) == 100
    assert left(100, 80, tokens=1000, cache=True) == 80


def test_keys_and_values_that_may_be_offloaded_make_room_for_small_buffers():
    assert (left(100, 500, link_gb_s=5.0), left(79, 500, link_gb_s=5.0)) == (80, 79)
