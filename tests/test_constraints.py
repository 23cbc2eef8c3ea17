"""constraints.txt: the tested versions meet the bounds of pyproject.toml, and name every direct dependency."""

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.paths import ROOT

tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
UNPINNED = {"triforce"}


def pinned():
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(each.name): each for each in requirements}


def direct():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    listed = [
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
    ]
    return [Requirement(each) for each in listed]


def test_every_direct_dependency_is_pinned_to_a_version_that_its_bound_admits():
    versions = pinned()
    wanted = [each for each in direct() if canonicalize_name(each.name) not in UNPINNED]
    assert len(wanted) > 20
    for requirement in wanted:
        (exact,) = versions[canonicalize_name(requirement.name)].specifier
        assert exact.operator == "=="
        assert requirement.specifier.contains(exact.version), requirement


def test_torch_is_the_version_that_the_scripts_install():
    setup = (ROOT / "scripts" / "setup.sh").read_text("utf-8")
    assert f'torch_requirement="{pinned()["torch"]}"' in setup
