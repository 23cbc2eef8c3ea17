"""The setting of the tree's shape."""

import pytest

from offload.errors import SettingsError
from offload.settings.tree_settings import MOST_NODES, TreeShape


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("auto", TreeShape("auto")),
        ("chain", TreeShape("chain")),
        ("64", TreeShape("best", 64)),
        (str(MOST_NODES), TreeShape("best", MOST_NODES)),
        ("k-ary:2x3x1", TreeShape("k-ary", 14, (2, 3, 1))),
        ("k-ary:16", TreeShape("k-ary", 16, (16,))),
    ],
)
def test_a_shape_is_parsed(text, shape):
    assert TreeShape.parse(text) == shape


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "tree is ''"),
        ("0", "tree is '0'"),
        ("-3", "tree is '-3'"),
        ("1025", "tree is '1025'"),
        ("9" * 5000, "tree is"),
        ("²", "tree is"),
        ("k-ary:", "tree is 'k-ary:'"),
        ("k-ary:2x0", "tree is 'k-ary:2x0'"),
        ("k-ary:2x", "tree is 'k-ary:2x'"),
        ("k-ary:32x32", "has 1,056 nodes"),
        ("k-ary:" + "x".join(["999999"] * 32), "has over 1,000,000,000 nodes"),
        ("k-ary:" + "x".join(["1"] * 33), "33 levels deep"),
        ("2x3", "tree is '2x3'"),
    ],
)
def test_a_wrong_shape_is_an_error_with_a_hint(text, message):
    with pytest.raises(SettingsError, match=message) as error:
        TreeShape.parse(text)
    assert error.value.hint and len(str(error.value)) < 200
