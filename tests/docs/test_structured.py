"""The recipes of docs/structured.md: the form of each command is a valid one, and allows what its reader expects."""

import re
import shlex

import pytest

from tests.support.constraints import accepts, byte_matcher
from tests.support.paths import ROOT
from triforce_cli.options.constraint_options import constraint_of_flags

EXPECTED = [
    ("json_schema", '{"narrator": "Ishmael", "place": "Nantucket"}', '{"narrator": "Ishmael"}'),
    ("choices", "yes", "maybe"),
    ("regex", "1789", "3789"),
    ("grammar", "red, blue, white", "red, blue, white, green"),
    ("json_schema", '[{"name": "Ahab", "role": "captain"}]', '[{"name": "Ahab"}]'),
]


def recipes(folder):
    """Return the options of each form in the page's shell blocks, whose files are written to a folder."""
    page = (ROOT / "docs" / "structured.md").read_text("utf-8")
    shell = "\n".join(re.findall(r"^```sh\n(.*?)^```", page, re.DOTALL | re.MULTILINE))
    for name, text in re.findall(r"^cat > (\S+) <<'END'\n(.*?)^END$", shell, re.DOTALL | re.MULTILINE):
        (folder / name).write_text(text, "utf-8")
    for text, name in re.findall(r"^echo '([^']*)' > (\S+)$", shell, re.MULTILINE):
        (folder / name).write_text(text, "utf-8")
    words = [
        word
        for line in re.findall(r"^triforce .*?(?=\n(?!\s)(?!\}))", shell, re.DOTALL | re.MULTILINE)
        for word in shlex.split(line)
    ]
    flags = {"--json-schema", "--choices", "--regex", "--grammar"}
    return [(word[2:].replace("-", "_"), words[at + 1]) for at, word in enumerate(words) if word in flags]


@pytest.mark.parametrize("number", range(len(EXPECTED)), ids=lambda number: f"{number}-{EXPECTED[number][0]}")
def test_each_recipe_s_form_allows_its_answer_and_no_other(tmp_path, monkeypatch, number):
    monkeypatch.chdir(tmp_path)
    found = recipes(tmp_path)
    assert [flag for flag, _ in found] == [flag for flag, _, _ in EXPECTED]
    flag, right, wrong = EXPECTED[number]
    form = constraint_of_flags(dict(found[number : number + 1]))
    assert form is not None and form.kind == flag.replace("_", "-")
    assert accepts(byte_matcher(form.kind, form.text), right.encode())
    assert not accepts(byte_matcher(form.kind, form.text), wrong.encode())
