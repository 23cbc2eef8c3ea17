"""Rules of the house, read from the sources: imports point down, and only the command line talks to the world."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OFFLOAD = sorted((ROOT / "offload").glob("*.py"))


def imported(path):
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("path", OFFLOAD, ids=lambda path: path.name)
def test_the_library_knows_nothing_of_the_terminal(path):
    assert not {"triforce_cli", "typer", "rich", "click"} & set(imported(path))
    names = {node.id for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Name)}
    assert "print" not in names
    if path.name != "embedded.py":  # hands its environment on to pip
        assert "environ" not in path.read_text("utf-8")


@pytest.mark.parametrize("path", [*OFFLOAD, *sorted((ROOT / "triforce_cli").rglob("*.py"))], ids=lambda p: p.name)
def test_nothing_unpickles_or_trusts_remote_code(path):
    text = path.read_text("utf-8")
    assert "trust_remote_code=True" not in text
    assert "torch.load(" not in text
    assert "pickle" not in set(imported(path))


@pytest.mark.parametrize("module", ["triforce_cli.app", "offload", "offload.config", "offload.hardware.profiles"])
def test_start_up_imports_no_torch(module):
    code = f"import sys, {module}; sys.exit(bool({{'torch', 'transformers'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
