"""Rules that the sources keep: imports point down, only the command line talks to the world, no code is loaded."""

import ast
import os
import re
import subprocess
import sys

from tests.support.paths import ROOT

LIBRARY = sorted((ROOT / "offload").rglob("*.py"))
SOURCES = [*LIBRARY, *sorted((ROOT / "triforce_cli").rglob("*.py"))]
USES_THE_ENVIRONMENT = {
    ROOT / "offload" / "kernels" / "native" / "threads.py",  # OMP_NUM_THREADS, as torch does
    ROOT / "offload" / "loading" / "hub" / "bundled.py",  # passes it on to pip
    ROOT / "offload" / "parallel" / "process_group.py",  # torch reads there what torchrun and `launch` have set
}
READS_PICKLES = ROOT / "offload/loading/formats/pickled.py"  # with torch's restricted unpickler


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
        assert "os.environ" not in text or path in USES_THE_ENVIRONMENT, path


def test_nothing_runs_code_from_a_checkpoint():
    for path in SOURCES:
        text = path.read_text("utf-8")
        assert "trust_remote_code=True" not in text, path
        calls = re.findall(r"torch\.load\b.*", text)
        if path == READS_PICKLES:
            assert len(calls) == 1 and "weights_only=True" in calls[0], calls
        else:
            assert not calls, path
        assert not re.search(r"add_safe_globals|safe_globals\(|weights_only=False", text), path


def test_start_up_imports_no_torch():
    modules = ("triforce_cli.app", "offload", "offload.settings.config", "offload.hardware.profiles")
    code = f"import sys, {', '.join(modules)}; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
