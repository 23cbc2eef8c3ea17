"""The README is short, names the command that CI runs, and its pictures need no script and no network."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from tests.support.paths import ROOT

README = (ROOT / "README.md").read_text("utf-8")
IMAGES = sorted((ROOT / "docs" / "images").glob("*.svg"))


def test_the_readme_has_at_most_110_lines():
    assert README.count("\n") <= 110


def test_the_two_commands_exist_and_the_second_is_what_ci_runs():
    block = re.search(r"## Try it\n\n```sh\n(.*?)```", README, re.DOTALL)[1]
    first, second = (line.split()[0] for line in block.splitlines())
    assert (ROOT / first).is_file()
    assert f'exec "$(dirname "${{BASH_SOURCE[0]}}")/../{second}" "$@"' in (ROOT / ".ci" / "run").read_text("utf-8")


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.stem)
def test_pictures_are_small_and_self_contained(image):
    text = image.read_text("utf-8")
    assert len(text) < 60_000
    assert {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(text).iter()}.isdisjoint(
        {"script", "image", "foreignObject", "use", "a"}
    )
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "") and "@import" not in text
