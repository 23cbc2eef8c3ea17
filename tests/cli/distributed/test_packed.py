"""What rank 0 sends to the other ranks as JSON arrives as it was."""

import json
from dataclasses import astuple
from pathlib import Path

import pytest

from offload.memory.tier_settings import TierSettings
from triforce_cli.input.documents import Document
from triforce_cli.input.excerpts import Position, Range
from triforce_cli.run.plan import packed_tiers, unpacked_tiers
from triforce_cli.summarize.instructions import AnswerStyle, load_templates
from triforce_cli.summarize.summary_job import SummaryRequest


def sent(value):
    return json.loads(json.dumps(value))


@pytest.mark.parametrize("tiers", [TierSettings(disk=Path("/a/b"), host_layers=2), TierSettings("host", share=0.5)])
def test_tiers(tiers):
    assert unpacked_tiers(sent(packed_tiers(tiers))) == tiers


def test_a_summary():
    range = Range(Position(fraction=0.25), None)
    summary = SummaryRequest([Document("a.txt", "text")], ["Who?"], AnswerStyle("short"), load_templates(), range)
    assert SummaryRequest.unpacked(*sent(astuple(summary))) == summary
