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
        ({"tree": "wide"}, "tree is 'wide'"),
        ({"tree_sampling": "greedy"}, "tree-sampling is 'greedy'"),
    ],
)
def test_impossible_settings_are_refused(wrong, message):
    with pytest.raises(SettingsError, match=message):
        Speculation(**wrong)


def test_the_tree_is_a_chain_unless_another_shape_is_named():
    assert Speculation().tree_shape.kind == "chain"
    assert Speculation(tree="64").tree_shape.nodes == 64
