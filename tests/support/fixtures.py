"""Fixtures shared by the tests, and hooks of the processes that run them; tests/conftest.py has those of all.

The command, and packages that not every installation has (psutil, platformdirs, gguf, hypothesis), are imported
where they are needed: scripts/check_gpu.py runs the GPU's tests without them.
"""

import atexit
import gc
import io
import os
import random
import signal
import sys
import warnings
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported: its kernels run on the CPU

from offload.kernels.native import LEVELS, Kernel, KernelUnavailable, find_kernel
from offload.kernels.native.library import open_library
from offload.kernels.native.ops import NativeOperations
from offload.kernels.ops import TorchOperations
from tests.support.models import make_hf_model, make_tokenizer
from tests.support.native_kernel import build_emulated
from tests.support.offloading import native_kernel

with suppress(ImportError):
    from hypothesis import settings

    # The same examples in every run: new ones are looked for by hand, with HYPOTHESIS_PROFILE=explore.
    settings.register_profile("repeatable", derandomize=True, deadline=None)
    settings.register_profile("explore", derandomize=False, deadline=None)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def _skipping():
    """Skip what needs the native kernel where it was not built."""
    try:
        return (yield)
    except KernelUnavailable as error:
        if native_kernel() is None:
            pytest.skip(f"there is no native kernel here: {error}")
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup():
    return (yield from _skipping())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    return (yield from _skipping())


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keep ten thousand tests and what they import away from the garbage collector, which looks at them in vain."""
    gc.disable()
    result = yield
    gc.enable()
    gc.set_threshold(20_000, 20, 20)  # of tests, too, it finds little
    gc.freeze()
    atexit.register(gc.unfreeze)  # libraries find at the end what they would otherwise report as leaked
    return result


def _names_a_test(config) -> bool:
    """Return whether the command line names a test, and not a file."""
    return any("::" in argument for argument in config.args)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Make cases long that `daily` does not name. Fails for a pattern that names none."""
    _make_levels_long(items)
    unused = set()
    for item in items:
        if daily := item.get_closest_marker("daily"):
            unused |= {(item.nodeid.partition("[")[0], pattern) for pattern in daily.args}
    for item in items:
        if daily := item.get_closest_marker("daily"):
            matching = {each for each in daily.args if fnmatchcase(item.callspec.id, each)}
            unused -= {(item.nodeid.partition("[")[0], pattern) for pattern in matching}
            if not matching:
                item.add_marker(pytest.mark.long)
    if unused and not _names_a_test(config) and native_kernel() is not None:
        raise pytest.UsageError(f"daily names no case: {sorted(unused)}")


def _make_levels_long(items):
    """Leave to daily runs the levels that differ most, and to long runs the emulated ones, whose build takes 25 s.

    The kernel's own tests run at every level of this processor; others at the best level and the portable one.
    """
    if os.environ.get("TRIFORCE_TEST_EMULATED"):  # scripts/check_sanitizers.sh
        return
    others = {level for level in LEVELS if _has_level(level)} - {"portable"}
    others -= {next((level for level in LEVELS if level in others), None)}
    for item in items:
        level = str(item.callspec.params.get("kernel", "")) if hasattr(item, "callspec") else ""
        if level.startswith("emulated") or (level in others and not item.nodeid.startswith("tests/kernels/")):
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session", autouse=True)
def interpreter_is_quick():
    """Kernels that Triton interprets take half of the time, where a test that was collected has imported it."""
    if "triton.runtime.interpreter" not in sys.modules:
        yield
        return
    from tests.support.triton_interpreter import quick_interpreter

    with quick_interpreter():
        yield


@pytest.fixture(scope="session")
def measure_once():
    """`microbenchmarks.measure`, which measures this machine once for the commands of all tests."""
    from offload.hardware import microbenchmarks

    return cache(microbenchmarks.measure)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory) -> Path:
    """A seeded tiny Llama with a byte-level tokenizer, as transformers saves them."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    make_hf_model("llama").save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def llama_dir(tmp_path) -> Path:
    """A tiny Llama with a head of its own, for a test to damage; no tokenizer."""
    make_hf_model("llama", tie_word_embeddings=False).eval().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(scope="session")
def embedded_model_dir() -> Path:
    """The embedded model, fetched into the user's cache if it is not there yet."""
    from offload.loading.hub.download import locate

    home = os.environ.get("TRIFORCE_HOME")
    return locate("smollm2-135m", Path(home) if home else None)


def named_build(variable: str) -> Path | None:
    """A build of the kernel that scripts/check_sanitizers.sh made. It must load: tests left out would say nothing."""
    name = os.environ.get(variable)
    if name:
        open_library(Path(name))
    return Path(name) if name else None


@pytest.fixture(scope="session")
def emulated_library(request, tmp_path_factory) -> Path:
    cache = getattr(request.config, "cache", None)  # None with -p no:cacheprovider
    folder = cache.mkdir("kernel") if cache else tmp_path_factory.mktemp("kernel")
    return named_build("TRIFORCE_TEST_EMULATED") or build_emulated(folder)


@pytest.fixture(scope="session")
def library() -> Path | None:
    """None: the installation's own."""
    return named_build("TRIFORCE_TEST_KERNEL")


def _has_level(level: str) -> bool:
    try:
        find_kernel(level)
    except KernelUnavailable:
        return False
    return True


def _tested_levels() -> list[str]:
    """Return the kernel's levels that this processor has, and emulations of the others."""
    own = [level for level in LEVELS if _has_level(level)]
    emulated = (
        LEVELS[:2] if os.environ.get("TRIFORCE_TEST_EMULATED") else [each for each in LEVELS[:2] if each not in own]
    )
    return [*own, *(f"emulated {level}" for level in emulated)]


@pytest.fixture(scope="session", params=_tested_levels())
def kernel(request, library) -> Kernel:
    """The native kernel at each level."""
    level = request.param.removeprefix("emulated ")
    if level != request.param:
        library = request.getfixturevalue("emulated_library")
    try:
        return find_kernel(level, library)
    except KernelUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def is_emulated(request) -> bool:
    """Whether the kernel is at an emulated level, which takes ten times as long."""
    return request.node.callspec.params["kernel"].startswith("emulated")


@pytest.fixture
def interruptible():
    """Let SIGINT interrupt, which a shell has its background jobs ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def set_threads():
    """torch.set_num_threads, undone after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(params=["torch", "native"])
def operations(request):
    """Torch's operations, and the native kernel's."""
    if request.param == "torch":
        return TorchOperations()
    if native_kernel() is None:
        pytest.skip("there is no native kernel here")
    return NativeOperations(native_kernel())


@pytest.fixture
def native_operations() -> NativeOperations:
    """The native kernel's operations: with them, whatever a session has computed may be saved."""
    if native_kernel() is None:
        pytest.skip("there is no native kernel here")
    return NativeOperations(native_kernel())


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> Path:
    """A seeded tiny Llama with heads that the native kernel takes; no tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    make_hf_model("llama", head_dim=32, max_position_embeddings=4096).save_pretrained(folder)
    return folder


@pytest.fixture
def home(tmp_path) -> Path:
    """Where prompts are kept; not made yet."""
    return tmp_path / "prompts"


@pytest.fixture(autouse=True)
def seeded():
    """Numbers drawn without a generator are those of the test, whatever ran before it in the same process."""
    random.seed(0)
    torch.default_generator.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def patience_with_disks():
    """A tiny model computes faster than a busy machine reads and writes; prompts go to and from disk all the same."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("offload.prompt_cache.writer.PATIENCE", 1000.0)
        yield


@pytest.fixture
def written(tmp_path):
    """Return a function that writes a profile (a mapping or raw text) to a file and returns its path as text."""
    import yaml

    def write(content):
        path = tmp_path / "mine.yaml"
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content), "utf-8")
        return str(path)

    return write


class Answer(NamedTuple):
    """What a command left, named as in CompletedProcess."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def triforce_here(tiny_model_dir, measure_once, tmp_path, monkeypatch, capsys):
    """In this process: `triforce_here("generate", "hi", stdin=b"", env={}) -> Answer`, on one thread.

    Seconds faster than a process of its own, and alone in the same way: a call gets its own standard input (None:
    /dev/null) and the environment that is set here, and takes back what it changes in it and in the warnings' filters.
    Seeds that nobody gave come from a generator with a fixed seed.
    """
    from triforce_cli.app import run, settle_libraries

    before = torch.get_num_threads()
    for name in [name for name in os.environ if name.startswith("TRIFORCE_") and "_TEST_" not in name]:
        monkeypatch.delenv(name)
    chosen = {"HOME": tmp_path / "home", "CONFIG": tmp_path / "config", "MODEL": tiny_model_dir}
    chosen |= {"DEVICE": "cpu", "DTYPE": "float32", "THREADS": 1, "CACHE": 0}
    for name, value in chosen.items():
        monkeypatch.setenv(f"TRIFORCE_{name}", str(value))
    monkeypatch.setattr("offload.hardware.microbenchmarks.measure", measure_once)
    monkeypatch.setattr("triforce_cli.options.settings.secrets.randbits", random.Random(0).getrandbits)

    def call(*args, stdin: bytes | None = b"", env=()):
        source = io.BufferedReader(io.FileIO(os.devnull)) if stdin is None else io.BytesIO(stdin)
        own_stdin, own_environment = patch.object(sys, "stdin", io.TextIOWrapper(source)), patch.dict(os.environ, env)
        with own_stdin, own_environment, warnings.catch_warnings():
            settle_libraries()
            code = run([str(arg) for arg in args])
        return Answer(code, *capsys.readouterr())

    yield call
    torch.set_num_threads(before)


@pytest.fixture
def on_a_terminal_here(triforce_here):
    """Return `triforce_here` on a pseudo-terminal; a call returns the exit code and what the terminal got."""
    from tests.support.terminal import Pty

    def call(*args, env=(), stdout=None):
        pty = Pty(columns=80, rows=24)
        stream = pty.stream()
        chosen = {"TERM": "xterm-256color", "NO_COLOR": "", "FORCE_COLOR": "", "CI": ""} | dict(env)
        with patch.object(sys, "stdout", stdout or stream), patch.object(sys, "stderr", stream):
            code = triforce_here(*args, stdin=None, env=chosen).returncode
        return code, pty.output()

    return call


@pytest.fixture(scope="session")
def draft_model_dir(tmp_path_factory):
    """A smaller tiny Llama with the same tokenizer."""
    folder = tmp_path_factory.mktemp("draft")
    make_hf_model("llama", seed=1, num_hidden_layers=1).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def opened_with_draft(tiny_model_dir, draft_model_dir):
    """The tiny model and its draft, with small caches; weights not loaded yet."""
    from offload import EngineConfig, Speculation, open_model
    from tests.support.engine import SMALL

    config = EngineConfig(model=str(tiny_model_dir), dtype="float32", device="cpu", prefill_chunk=16)
    return open_model(config, speculation=Speculation("naive", str(draft_model_dir), **SMALL))


@pytest.fixture(scope="session")
def endless_engine(opened_with_draft):
    """An engine that no token ends."""
    from offload.engine import Engine

    loaded = opened_with_draft.load()
    return Engine(loaded.model, (), 16, loaded.draft)
