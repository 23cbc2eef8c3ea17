"""What rank 0 sends to the other ranks as JSON arrives as it was."""

import json
from pathlib import Path

import pytest

from offload.memory.tier_settings import TierSettings
from triforce_cli.run.plan import packed_tiers, unpacked_tiers


def sent(value):
    return json.loads(json.dumps(value))


@pytest.mark.parametrize("tiers", [TierSettings(disk=Path("/a/b"), host_layers=2), TierSettings("host", share=0.5)])
def test_tiers(tiers):
    assert unpacked_tiers(sent(packed_tiers(tiers))) == tiers
