"""The README is short, names the command that CI runs, and its pictures need no script and no network."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from offload.settings.platforms import RUNS_ON
from tests.support.paths import ROOT

README = (ROOT / "README.md").read_text("utf-8")
IMAGES = sorted((ROOT / "docs" / "images").glob("*.svg"))


def test_the_readme_has_at_most_200_lines():
    assert README.count("\n") <= 200


def test_the_two_commands_exist_and_the_second_is_what_ci_runs():
    block = re.search(r"## Two commands\n\n```sh\n(.*?)```", README, re.DOTALL)[1]
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


@pytest.mark.parametrize("page", ["README.md", "docs/planning.md"])
def test_the_platforms_of_the_error_are_those_of_the_pages(page):
    assert "\n".join(f"- {line}" for line in RUNS_ON) in (ROOT / page).read_text("utf-8")


def test_plans_for_a_book_are_those_of_the_page_on_models():
    page = [row.split(" | ") for row in (ROOT / "docs" / "models.md").read_text("utf-8").splitlines() if "GB | " in row]
    known = {(row[2].strip(), row[7], f"{row[8]} → {row[9].rstrip(' |')} ms") for row in page if len(row) == 10}
    rows = re.findall(r"^\| [^|]*GB[^|]* \| (\S+)[^|]* \| [^|]* \| (\d+ s) \| (\d+ → \d+ ms) \|$", README, re.MULTILINE)
    assert len(rows) >= 7 and set(rows) <= known
