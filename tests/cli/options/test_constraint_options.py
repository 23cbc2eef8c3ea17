"""Options, lines and requests that give an answer a form -> constraints."""

import json
from pathlib import Path

import pytest

from offload.constraints.quotes import quotations
from offload.errors import SettingsError
from offload.settings.constraint import Constraint
from triforce_cli.input.documents import read_prompt
from triforce_cli.options.constraint_options import constraint_of, constraint_of_flags
from triforce_cli.run.generation import quotation_fields


def test_a_schema_is_a_file_or_its_text_or_stdin(tmp_path, monkeypatch):
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"type": "null"}')
    found = Constraint("json-schema", '{"type": "null"}')
    assert constraint_of_flags({"json_schema": str(tmp_path / "a.json")}) == found
    assert constraint_of_flags({"json_schema": ' {"type": "null"}'}) == Constraint("json-schema", ' {"type": "null"}')
    assert constraint_of({"json_schema": {"type": "null"}}) == found
    assert constraint_of_flags({"json_schema": "true"}) == Constraint("json-schema", "true")
    with (tmp_path / "a.json").open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert constraint_of_flags({"json_schema": "-"}) == found


def test_other_forms(tmp_path):
    (tmp_path / "a.lark").write_text('start: "a"')
    assert constraint_of_flags({"grammar": str(tmp_path / "a.lark")}) == Constraint("grammar", 'start: "a"')
    assert constraint_of_flags({"choices": "yes, no"}) == Constraint("choices", '["yes", "no"]')
    assert constraint_of_flags({"regex": "a+"}) == Constraint("regex", "a+")
    assert constraint_of_flags({"json": True}) is None


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"json_schema": "/absent.json"}, "No such file"),
        ({"grammar": "/"}, "Is a directory"),
        ({"regex": "a", "choices": "b"}, "contradict each other"),
        ({"regex": ""}, "regex is empty"),
    ],
)
def test_what_is_wrong_is_refused(params, message):
    with pytest.raises(SettingsError, match=message):
        constraint_of_flags(params)


def test_quotations_are_of_one_document(triforce, tmp_path):
    (tmp_path / "a.txt").write_text("The whale was white.")
    (tmp_path / "b.txt").write_text("The sea was not.")
    both = triforce("summarize", tmp_path / "a.txt", tmp_path / "b.txt", "--quote")
    assert both.returncode == 2 and "there are 2 documents" in both.stderr
    found = triforce("generate", "-f", tmp_path / "a.txt", "--quote", "--json", "-n", "30", "--temperature", "0")
    done = json.loads(found.stdout.splitlines()[-1])
    assert done["settings"]["constraint"] == {"kind": "quote", "text": None, "after_thinking": True}
    assert all(each["start"] >= 0 for each in done["quotes"])


def test_a_quotation_of_several_files_is_placed_in_its_own(tmp_path):
    texts = {"a.txt": "The whale was white.\n\n", "b.txt": "\n\n\nThe sea\nwas not.\n", "c.txt": "Nor the sky."}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    read = read_prompt("Why?", [tmp_path / name for name in texts], None, print)
    for found in quotations('"whale", "sea was", "sky", "Why" and "whale."', read.document):
        placed = quotation_fields(found, read.parts)
        if found.start < 0:
            assert placed == found._asdict() and found.text in ("Why", "whale.")
            continue
        name = Path(placed["document"]).name
        assert texts[name][placed["start"] : placed["end"]].replace("\n", " ") == found.text
    alone = read_prompt("Why?", [tmp_path / "b.txt"], None, print)
    assert "document" not in quotation_fields(next(quotations('"sea"', alone.document)), alone.parts)
