"""The wheel: everything inside, and the program runs from it in a folder that has nothing to do with the repository."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PACKAGES = ("offload", "triforce", "triforce_cli")


def run(command, cwd, **more):
    """A command that must succeed, away from the repository; its stdout."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "TRIFORCE_"))}
    environment |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", **more}
    command = [str(part) for part in command]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


NEVER_SHIPPED = (".git", ".venv", ".*_cache", ".hypothesis", "*.egg-info", "__pycache__", "build", "dist")
UNNEEDED = (*NEVER_SHIPPED, "docs", "examples", "tests")
BUILT_IN_PLACE = ("_kernel*", "build-error.txt")
NATIVE = ROOT / "offload" / "kernels" / "native"
FILES_URL = "https://host.example/owner/triforce/raw/v1"


def build_wheel(work, *, compiled=None, **environment):
    """Built from a copy: setuptools leaves its working files in the folder it builds from.

    A `compiled` kernel that is newer than its sources is not compiled again, which takes most of a minute.
    """
    shutil.copytree(ROOT, work / "source", ignore=shutil.ignore_patterns(*UNNEEDED, *BUILT_IN_PLACE))
    if compiled is not None:
        folder = f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
        target = work / "source" / "build" / folder / compiled.relative_to(ROOT)
        target.parent.mkdir(parents=True)
        shutil.copyfile(compiled, target)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", work / "dist"]
    if find_spec("setuptools"):  # otherwise pip fetches one
        command.append("--no-build-isolation")
    run([*command, work / "source"], work, **environment)
    (built,) = (work / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    built = next(NATIVE.glob("_kernel*"), None)
    return build_wheel(tmp_path_factory.mktemp("wheel"), compiled=built, TRIFORCE_FILES_URL=FILES_URL)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The bin folder of a fresh environment with the wheel in it; dependencies are seen in the running environment."""
    home = tmp_path_factory.mktemp("installed") / "an environment"
    venv.create(home, symlinks=os.name != "nt")
    scripts, site = (
        Path(sysconfig.get_path(kind, "venv", vars={"base": home, "platbase": home, "installed_base": home}))
        for kind in ("scripts", "purelib")
    )
    seen = dict.fromkeys(path for path in sys.path if path.endswith(("site-packages", "dist-packages")))
    # Its .pth files are not followed, so an editable installation there stays out of sight.
    (site / "dependencies.pth").write_text("".join(f"{path}\n" for path in seen))
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--ignore-installed", wheel]
    run([scripts / "python", *install], home)
    return scripts


def test_the_wheel_holds_the_packages_and_their_data(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    code = {path.relative_to(ROOT).as_posix() for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == code
    shipped = {f"offload/profiles/{path.name}" for path in (ROOT / "profiles").glob("*.yaml")}
    assert shipped and {name for name in names if name.endswith(".yaml")} == shipped
    templates = {f"triforce_cli/templates/{name}.txt" for name in ("document", "notes", "part")}
    assert {name for name in names if name.endswith(".txt") and "/templates/" in name} == templates
    page = {path.relative_to(ROOT).as_posix() for path in (ROOT / "triforce_cli/serve/page").iterdir()}
    assert {name for name in names if "/page/" in name} == page
    assert {name for name in names if name.endswith("py.typed")} == {f"{package}/py.typed" for package in PACKAGES}
    assert any(name.endswith("/LICENSE") for name in names)
    compiled = {path.relative_to(ROOT).as_posix() for path in NATIVE.glob("_kernel*")}
    if compiled:  # in place: by an installation, which an unpacked source distribution may lack
        assert {name for name in names if "/_kernel" in name} == compiled


def test_the_wheel_is_for_every_python(wheel):
    """The libraries know nothing of Python's ABI; the oldest Python is that of requires-python."""
    oldest = re.search(r'requires-python = ">=3\.(\d+)"', (ROOT / "pyproject.toml").read_text("utf-8"))[1]
    assert wheel.name.split("-")[2:4] == [f"cp3{oldest}", "abi3"]


def test_the_page_of_an_index_links_to_the_files_of_the_release(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        page = archive.read(metadata).decode()
    assert "\nProject-URL: Source, https://host.example/owner/triforce\n" in page
    links = re.findall(r"(!?)\[[^]]*\]\(([^)]+)\)", page)
    assert f"{FILES_URL}/docs/images/terminal.svg" in {link for picture, link in links if picture}
    assert f"{FILES_URL.replace('/raw/', '/blob/')}/docs/cli.md" in {link for picture, link in links if not picture}
    assert all(link.startswith(("https://", "#")) for _, link in links)


@pytest.mark.long
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not in a clone")
def test_the_source_distribution_has_all_that_is_in_the_repository(tmp_path):
    pytest.importorskip("setuptools")
    tracked = run(["git", "ls-files"], ROOT).splitlines()
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*NEVER_SHIPPED))
    run([sys.executable, "-c", "from setuptools import build_meta; build_meta.build_sdist('dist')"], source)
    (built,) = (source / "dist").glob("*.tar.gz")
    with tarfile.open(built) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {path for path in tracked if (ROOT / path).exists()} - {".gitignore"}
    assert wanted <= held
    assert not {path for path in held if path.endswith((".so", ".pyc"))}


@pytest.mark.long
def test_the_program_runs_from_the_wheel(installed, tiny_model_dir, tmp_path):
    where = run([installed / "python", "-c", "import offload; print(offload.__file__)"], tmp_path).strip()
    assert Path(where).is_relative_to(installed.parent)
    path = os.pathsep.join([str(installed), os.environ["PATH"]])
    program = shutil.which("triforce", path=path)
    assert Path(program).parent == installed
    assert re.fullmatch(r"triforce \d+\.\d+\.\d+\n", run([program, "--version"], tmp_path, PATH=path))
    listed = run([program, "profile"], tmp_path, PATH=path)
    assert all(name in listed for name in ("cpu", "rtx-4090", "2x-rtx-4090", "a100"))
    command = [program, "generate", "Once", "--model", tiny_model_dir, "-n", "12", "--device", "cpu", "--json"]
    last = json.loads(run(command, tmp_path, PATH=path).splitlines()[-1])
    assert last["type"] == "done" and last["new_tokens"] > 0


@pytest.mark.long
@pytest.mark.skipif(shutil.which("false") is None, reason="there is no program that fails")
def test_without_a_compiler_all_but_the_native_kernel_is_installed(tmp_path):
    """And what went wrong is not lost: it is in the wheel, and in what find_kernel raises."""
    built, unpacked = build_wheel(tmp_path, CC=shutil.which("false")), tmp_path / "unpacked"
    zipfile.ZipFile(built).extractall(unpacked)
    native = unpacked / "offload" / "kernels" / "native"
    assert not list(native.glob("_kernel*"))
    reason = (native / "build-error.txt").read_text("utf-8").strip()
    assert shutil.which("false") in reason
    code = "from offload.kernels.native import find_kernel; find_kernel()"
    asked = subprocess.run([sys.executable, "-c", code], cwd=unpacked, capture_output=True, text=True, check=False)
    assert asked.stderr.rstrip().endswith(f"KernelUnavailable: not built: {reason}")
