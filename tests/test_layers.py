"""Rules that the sources keep: imports point down, only the command line talks to the world, no code is loaded."""

import ast
import os
import subprocess
import sys

from tests.support.paths import ROOT

LIBRARY = sorted((ROOT / "offload").rglob("*.py"))
SOURCES = [*LIBRARY, *sorted((ROOT / "triforce_cli").rglob("*.py"))]
PASSES_ITS_ENVIRONMENT_ON = ROOT / "offload" / "loading" / "bundled.py"  # to pip


def test_imports_keep_the_contracts():
    """Those of pyproject.toml: layers, no circle, no terminal in the library, no pickle."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_library_neither_prints_nor_reads_the_environment():
    for path in LIBRARY:
        text = path.read_text("utf-8")
        assert "print" not in {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}, path
        assert "os.environ" not in text or path == PASSES_ITS_ENVIRONMENT_ON, path


def test_nothing_runs_code_from_a_checkpoint():
    for path in SOURCES:
        text = path.read_text("utf-8")
        assert "trust_remote_code=True" not in text, path
        assert "torch.load(" not in text, path


def test_start_up_imports_no_torch():
    modules = ("triforce_cli.app", "offload", "offload.config", "offload.hardware.profiles")
    code = f"import sys, {', '.join(modules)}; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
