"""Settings that contradict each other or mean nothing are refused when they are made; shapes of trees are parsed."""

import pytest

from offload import Speculation
from offload.errors import SettingsError
from offload.settings.config import Placement, check_part
from offload.settings.tree_settings import MOST_NODES, TreeShape

H2O = {"method": "ar", "approximate": "h2o", "sink": 2, "window": 5, "budget": 32, "chunk": 2}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"method": "magic"}, "method is 'magic'"),
        ({"method": "naive"}, "naive needs a draft model"),
        ({"budget": 8, "chunk": 8}, "budget is 8"),
        ({"gamma2": 0}, "gamma2 is 0"),
        ({"window": 0}, "window is 0"),
        ({"rebuild_every": 0}, "rebuild-every is 0"),
        ({"middle": "h20"}, "middle is 'h20'"),
        ({"tree_sampling": "greedy"}, "tree-sampling is 'greedy'"),
        (H2O | {"approximate": "sink"}, "use one of: streaming-llm, h2o"),
        (H2O | {"method": "auto"}, "h2o decodes plainly, and the method is auto"),
        (H2O | {"method": "lookup"}, "use --method ar"),
        (H2O | {"window": 30}, "leaves none beside the sink of 2 and the window of 30"),
        (H2O | {"approximate": "streaming-llm", "sink": 32}, "leaves none beside the sink of 32"),
        *(
            ({"tree": text}, message)
            for text, message in (
                ("", "tree is ''"),
                ("0", "tree is '0'"),
                ("1025", "tree is '1025'"),
                ("9" * 5000, "tree is"),
                ("²", "tree is"),
                ("k-ary:", "tree is 'k-ary:'"),
                ("k-ary:2x0", "tree is 'k-ary:2x0'"),
                ("k-ary:32x32", "has 1,056 nodes"),
                ("k-ary:" + "x".join(["999999"] * 32), "has over 1,000,000,000 nodes"),
                ("k-ary:" + "x".join(["1"] * 33), "33 levels deep"),
                ("2x3", "tree is '2x3'"),
            )
        ),
    ],
)
def test_impossible_settings_are_refused(wrong, words):
    with pytest.raises(SettingsError) as error:
        Speculation(**wrong)
    assert words in f"{error.value.message} {error.value.hint}"
    assert error.value.hint and len(str(error.value)) < 300


def test_a_part_of_the_settings_is_checked_alone():
    check_part({"approximate": "h2o"})
    check_part({"approximate": "h2o", "budget": 2000, "offload": Placement().offload})
    with pytest.raises(SettingsError, match="the method is triforce"):
        check_part({"approximate": "h2o", "method": "triforce"})


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("auto", TreeShape("auto")),
        ("chain", TreeShape("chain")),
        (str(MOST_NODES), TreeShape("best", MOST_NODES)),
        ("k-ary:2x3x1", TreeShape("k-ary", 14, (2, 3, 1))),
    ],
)
def test_a_shape_is_parsed(text, shape):
    assert TreeShape.parse(text) == Speculation(tree=text).tree_shape == shape
