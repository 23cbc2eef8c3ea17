"""What is measured on a GPU."""

from dataclasses import replace

import pytest
import torch

from offload.api.diagnosis import examine
from offload.hardware import calibration as kept
from offload.hardware.microbenchmarks import BenchmarkSizes, measure
from offload.settings.config import EngineConfig

SMALL = BenchmarkSizes(read=2**26, copy=2**22, host_rows=64, device_rows=256)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_and_its_link_are_measured(tmp_path):
    found = measure("cuda", sizes=replace(SMALL, copy=2**26, device_rows=4096))
    assert found.gpu.model == torch.cuda.get_device_name()
    assert found.link.bandwidth_gb_s < found.gpu.bandwidth_gb_s
    assert found.link.to_host_gb_s > 0.1 and found.link.pageable_gb_s > 0.1
    assert 0.5 < found.link.latency_us < 10_000
    kept.save(found, tmp_path)
    assert kept.load(tmp_path) == found


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_doctor_knows_a_gpu_and_its_link():
    for gpu in examine(EngineConfig())["device"]["gpus"]:
        assert gpu["name"] and gpu["memory_bytes"] >= gpu["free_bytes"] > 0
        assert 0.1 < gpu["link_gb_s"] < 10_000
