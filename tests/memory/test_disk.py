"""Keys and values on disk: every method emits what it emits in memory; disks that fail, are slow or end too early."""

import errno
import os

import pytest
import torch

from offload.engine import Engine
from offload.errors import OutOfDisk
from offload.events import Tokens
from offload.kernels.native.ops import NativeOperations
from offload.kernels.native.structs import PIECE
from offload.kernels.ops import TorchOperations
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.weights import load_model
from offload.memory.disk_link import DiskFailed
from offload.memory.factory import TieredStoreFactory
from offload.prompt_cache.fingerprint import TOKENS
from offload.settings.config import GenerationConfig, Sampling, Speculation
from offload.system.scratch_file import ScratchFile
from tests.support.models import ids
from tests.support.offloading import CPU, PoisonedDisk, SmallPages, native_kernel
from tests.support.prompt_cache import engine_on, files, said

LENGTH, NEW = 2 * PIECE + 77, 40


class FaultyFile(ScratchFile):
    """A file whose reads and writes `fault` may delay or replace; it is called with the kind of the call."""

    fault = staticmethod(lambda kind: None)

    def read_some(self, views, offset):
        done = self.fault("read")
        return super().read_some(views, offset) if done is None else done

    def write_some(self, views, offset):
        done = self.fault("write")
        return super().write_some(views, offset) if done is None else done


@pytest.fixture(scope="module")
def model(model_dir):
    kernel = native_kernel()
    operations = TorchOperations() if kernel is None else NativeOperations(kernel)
    return load_model(FolderCheckpoint(model_dir), torch.bfloat16, CPU, lambda done, total: None, operations)


@pytest.fixture
def new_engine(model, tmp_path):
    def make(resident=1, page=PIECE, **rest):
        tiers = SmallPages("stream", resident, page_tokens=page, disk=tmp_path)
        stores = TieredStoreFactory(model.operations, CPU, tiers, PoisonedDisk(), **rest)
        return Engine(model, (), 128, stores=stores)

    return make


@pytest.fixture
def faulty(new_engine):
    """An engine over a file that `fault` can spoil, and the class to set it on."""

    class File(FaultyFile):
        pass

    return new_engine(new_file=File), File


GREEDY, COUPLED = Sampling(temperature=0), Sampling(temperature=1, coupled=True)
METHODS = [
    ("ar", {}),
    ("lookup", {}),
    ("triforce", {}),
    ("lookup", {"tree": "k-ary:2x2"}),
    ("retrieval", {"draft": "none", "tree": "auto"}),
]


def run(engine, prompt, method="ar", sampling=GREEDY, new=NEW, **more):
    """Yield the tokens of one request."""
    wanted = Speculation(method, **{"budget": 128, "chunk": 16, "sink": 16} | more)
    for event in engine.generate(prompt, sampling, GenerationConfig(max_new_tokens=new, seed=3), wanted):
        if isinstance(event, Tokens):
            yield from event.ids


@pytest.fixture(scope="module")
def expected(model):
    """Tokens in memory: of greedy decoding, and of the seed's coupled sampling."""
    engine = Engine(model, (), 128)
    return {sampling.temperature: list(run(engine, ids(LENGTH), sampling=sampling)) for sampling in (GREEDY, COUPLED)}


@pytest.mark.parametrize(("method", "more"), METHODS)
def test_every_method_emits_what_it_emits_in_memory(new_engine, expected, tmp_path, method, more):
    engine = new_engine()
    for sampling in (GREEDY, COUPLED):
        assert list(run(engine, ids(LENGTH), method, sampling, **more)) == expected[sampling.temperature]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("page", [192, PIECE])
def test_a_cached_prompt_is_restored_to_disk(model_dir, home, tmp_path, native_operations, page):
    (folder := tmp_path / "pages").mkdir()
    tiers = SmallPages("stream", 1, page_tokens=page, disk=folder)
    prompt = ids(900)
    expected, _ = said(engine_on(model_dir, None, operations=native_operations), prompt)
    for restored in (0, 7 * TOKENS):
        engine = engine_on(model_dir, home, tiers, native_operations)
        assert said(engine, prompt, "retrieval") == (expected, restored)
    assert files(home)


def io_error(kind):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def no_room(kind):
    if kind == "write":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def short(kind):
    return 0


@pytest.mark.parametrize("fault", [io_error, short])
@pytest.mark.parametrize("method", ["ar", "retrieval"])
def test_a_read_that_fails_keeps_the_tokens_so_far_and_the_next_request_is_right(faulty, expected, fault, method):
    engine, file = faulty
    found = []

    def read_until_it_fails():
        for token in run(engine, ids(LENGTH), method):
            found.append(token)
            if len(found) == 10:
                file.fault = staticmethod(fault)

    with pytest.raises(DiskFailed, match=r"on disk could not be read .* (error|too early)") as caught:
        read_until_it_fails()
    assert found == expected[0][: len(found)] and len(found) >= 10
    assert "--disk" in caught.value.hint
    file.fault = staticmethod(lambda kind: None)
    assert list(run(engine, ids(LENGTH), method)) == expected[0]


def test_a_disk_that_becomes_full_is_an_error_and_the_next_request_is_right(faulty, expected):
    """Where the file system does not allocate the space at once."""
    engine, file = faulty
    file.fault = staticmethod(no_room)
    with pytest.raises(DiskFailed, match=r"No space left"):
        list(run(engine, ids(LENGTH)))
    file.fault = staticmethod(lambda kind: None)
    assert list(run(engine, ids(LENGTH))) == expected[0]


def test_a_full_disk_is_an_error_before_the_prompt_is_read(new_engine):
    def full(folder, size):
        return ScratchFile(folder, 2**60)

    with pytest.raises(OutOfDisk):
        list(run(new_engine(new_file=full), ids(LENGTH)))
