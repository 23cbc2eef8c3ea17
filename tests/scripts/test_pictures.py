"""scripts/pictures.py and scripts/record_terminal.py: the pictures are those of the sources, and of a real terminal."""

import importlib.util
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import pytest

from tests.support.paths import ROOT, SCRIPTS

IMAGES = ROOT / "docs" / "images"


def run(script, *arguments):
    command = [sys.executable, SCRIPTS / script, *arguments]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])  # of a checkout that is not installed
    env = os.environ | {"PYTHONPATH": path}
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, cwd=ROOT, env=env)


def test_pictures_are_up_to_date(tmp_path):
    done = run("pictures.py", "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    made = {path.name: path.read_text("utf-8") for path in tmp_path.iterdir()}
    assert set(made) == {path.name for path in IMAGES.glob("*.svg")} - {"terminal.svg"}  # which is recorded
    stale = [name for name, text in made.items() if (IMAGES / name).read_text("utf-8") != text]
    assert stale == [], "run scripts/pictures.py"


def test_an_unknown_picture_is_refused(tmp_path):
    done = run("pictures.py", "--output", tmp_path, "mandala")
    assert done.returncode == 2 and "mandala" in done.stderr and "hierarchy" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_terminal_is_recorded_with_its_colours_and_without_what_was_overwritten(tmp_path):
    pytest.importorskip("pyte")
    script = r"printf 'bar 10 %%\r\033[Kred: \033[31m1 < 2\033[0m\n'; test -t 1 && stty size"
    done = run("record_terminal.py", tmp_path / "x.svg", "--columns", "40", "--rows", "9", "--", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    texts = list(ElementTree.parse(tmp_path / "x.svg").iter("{http://www.w3.org/2000/svg}text"))
    shown = [element.text for element in texts]
    assert shown[-3:] == ["red:", "1 < 2", "9 40"]
    assert texts[-2].get("fill") != texts[-3].get("fill")


def test_a_screen_can_be_taken_before_the_end(monkeypatch):
    pytest.importorskip("pyte")
    spec = importlib.util.spec_from_file_location("record_terminal", SCRIPTS / "record_terminal.py")
    spec.loader.exec_module(recorder := importlib.util.module_from_spec(spec))
    clock, read = [0.0], os.read

    def reading(*args):
        data = read(*args)
        clock[0] += b"so far" in data  # its second has passed as soon as the line is there
        return data

    monkeypatch.setattr(recorder, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(recorder.os, "read", reading)
    screen = recorder.record(["sh", "-c", "echo so far; sleep 600; echo end"], 40, 9, at=1.0)
    assert [line.rstrip() for line in screen.display if line.strip()] == ["so far"]
