"""What rank 0 sends to the other ranks as JSON arrives as it was."""

import json
from dataclasses import astuple
from pathlib import Path

import pytest

from offload.memory.tier_settings import TierSettings
from triforce_cli.batch.batch_files import Line
from triforce_cli.input.documents import Document
from triforce_cli.input.excerpts import Position, Range
from triforce_cli.run.plan import packed_tiers, unpacked_tiers
from triforce_cli.summarize.instructions import AnswerStyle, load_templates
from triforce_cli.summarize.summary_job import SummaryRequest


def sent(value):
    return json.loads(json.dumps(value))


@pytest.mark.parametrize("data", ["é 😀".encode(), b"\xff\x80{", "\ud800".encode("utf-8", "surrogatepass"), b"\0"])
def test_a_line_of_any_bytes(data):
    line = Line(2, 7, data)
    assert Line.unpacked(*sent(line.packed())) == line


@pytest.mark.parametrize("tiers", [TierSettings(disk=Path("/a/b"), host_layers=2), TierSettings("host", share=0.5)])
def test_tiers(tiers):
    assert unpacked_tiers(sent(packed_tiers(tiers))) == tiers


def test_a_summary():
    range = Range(Position(fraction=0.25), None)
    summary = SummaryRequest([Document("a.txt", "text")], ["Who?"], AnswerStyle("short"), load_templates(), range)
    assert SummaryRequest.unpacked(*sent(astuple(summary))) == summary
