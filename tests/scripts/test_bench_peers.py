"""Which peers `scripts/bench_peers.py` leaves out, and why."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.paths import SCRIPTS


@pytest.fixture(scope="module")
def peers():
    spec = importlib.util.spec_from_file_location("bench_peers", SCRIPTS / "bench_peers.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclass looks for the names of its annotations
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize(
    ("gpu", "installed", "builds", "gguf", "offloaded", "expected"),
    [
        (False, False, False, None, False, {}),
        (False, False, False, "a.gguf", False, {"llama.cpp": "llama-cpp-python is not installed"}),
        (False, True, False, "a.gguf", False, {}),
        (False, True, False, "a.gguf", True, {"transformers' OffloadedCache": "it needs a CUDA GPU",
                                              "llama.cpp": "llama-cpp-python is built without a GPU"}),
        (True, True, True, None, True, {"llama.cpp": "give it a file with --gguf"}),
        (True, True, True, "a.gguf", True, {}),
    ],
)  # fmt: skip
def test_what_cannot_run_is_left_out_with_its_reason(
    peers, monkeypatch, gpu, installed, builds, gguf, offloaded, expected
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    monkeypatch.setattr(peers, "find_spec", lambda _: object() if installed else None)
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(llama_supports_gpu_offload=lambda: builds))
    assert peers.left_out(None if gguf is None else Path(gguf), offloaded) == expected
