"""The table of models in the documentation is what plans say today."""

import os
import subprocess
import sys

from tests.support.paths import ROOT, SCRIPTS


def test_the_documented_models_have_their_planned_numbers():
    text = (ROOT / "docs" / "models.md").read_text("utf-8")
    command = [sys.executable, SCRIPTS / "models_table.py"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout in text
