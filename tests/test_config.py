"""Settings that contradict each other or mean nothing: refused when they are made."""

import pytest

from offload import Speculation
from offload.errors import SettingsError


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"method": "magic"}, "method is 'magic'"),
        ({"method": "naive"}, "naive needs a draft model"),
        ({"budget": 8, "chunk": 8}, "budget is 8"),
        ({"gamma2": 0}, "gamma2 is 0"),
        ({"window": 0}, "window is 0"),
        ({"rebuild_every": 0}, "rebuild-every is 0"),
    ],
)
def test_impossible_settings_are_refused(wrong, message):
    with pytest.raises(SettingsError, match=message):
        Speculation(**wrong)
