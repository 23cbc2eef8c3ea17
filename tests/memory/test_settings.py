"""Settings of tiers that cannot be are errors with a hint, before anything is allocated."""

from pathlib import Path

import pytest

from offload.errors import SettingsError
from offload.memory.factory import TieredStoreFactory, make_link
from offload.memory.tier_settings import TierSettings
from tests.support.offloading import CPU

DISK = Path("/a")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mode": "auto"}, "mode is 'auto'"),
        ({"page_tokens": 128}, "page_tokens is 128"),
        ({"page_tokens": 768}, "page_tokens is 768"),
        ({"page_tokens": 0}, "page_tokens is 0"),
        ({"buffers": 1}, "buffers is 1"),
        ({"mode": "host", "disk": DISK}, "pages on disk are streamed, and mode is host"),
        ({"mode": "hybrid", "share": 1.5}, "share is 1.5"),
        ({"share": 0.5}, "share is 0.5, and mode is stream"),
        ({"experts": "auto"}, "experts is 'auto'"),
        ({"experts": "host", "expert_rows": 0}, "expert_rows is 0"),
        ({"host_layers": -1, "disk": DISK}, "host_layers is -1"),
        ({"link_gb_s": 0.0}, "link_gb_s is 0"),
    ],
)
def test_wrong_ones_are_refused(values, message):
    with pytest.raises(SettingsError, match=message) as caught:
        TierSettings(**values)
    assert caught.value.hint


def test_a_cpu_without_a_simulated_link_is_refused():
    with pytest.raises(SettingsError, match="cpu has no link") as caught:
        make_link(CPU)
    assert "link_gb_s=25" in caught.value.hint


def test_pages_of_the_usual_sizes_are_taken():
    for settings in (
        TierSettings(page_tokens=512),
        TierSettings("hybrid", page_tokens=1024, share=0.0),
        TierSettings(),
    ):
        assert TieredStoreFactory(None, CPU, settings, link=object()).settings == settings
