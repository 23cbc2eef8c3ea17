"""Targets of drafters, by kernel."""

import pytest
import torch

from offload.kernels.native.ops import NativeOperations
from offload.kernels.ops import TorchOperations
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.weights import load_model
from tests.support.offloading import CPU, native_kernel


@pytest.fixture(scope="module")
def targets(reference, tmp_path_factory):
    """The target by kernel: `reference`, a model of transformers that each module has of its own, as ours."""
    folder, found = tmp_path_factory.mktemp("target"), {}
    reference.save_pretrained(folder)
    for name in ("torch", "native"):
        if name == "torch" or native_kernel() is not None:
            do = TorchOperations() if name == "torch" else NativeOperations(native_kernel())
            found[name] = load_model(FolderCheckpoint(folder), torch.float32, CPU, lambda done, total: None, do)
    return found


@pytest.fixture(params=["torch", "native"])
def target(request, targets):
    return targets.get(request.param) or pytest.skip("there is no native kernel here")
