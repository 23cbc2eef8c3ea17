"""Tiny engines with a prompt cache, in this process or in others that may be killed."""

import resource
import signal
import warnings
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load_file

from offload import GenerationConfig, Sampling, Speculation, Tokens
from offload.engine import Engine
from offload.errors import Degraded
from offload.events import Restored
from offload.kernels.ops import TorchOperations
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.weights import load_model
from offload.loading.weights_digest import weights_digest
from offload.memory.factory import TieredStoreFactory
from offload.prompt_cache import writer as saving
from offload.prompt_cache.folder import PromptFolder
from offload.prompt_cache.prompt import PromptCache
from offload.settings.kv_formats import BF16
from tests.support.forked import CONTEXT, start_server
from tests.support.offloading import PoisonedDisk, make_link

CPU = torch.device("cpu")
CHUNK, NEW = 64, 24
LENGTH = 900  # tokens of a prompt: 7 whole blocks


def files(home):
    """Return the block files of a prompt cache."""
    return sorted(home.glob("*/*.safetensors"))


def spoil(path):
    """Damage some bytes of a block's keys and values."""
    data = bytearray(path.read_bytes())
    data[-600:-596] = bytes(byte ^ 255 for byte in data[-600:-596])
    path.write_bytes(data)


def tensors(home):
    """Return the tensors of all block files, without the times in their headers."""
    return [{name: tensor.tolist() for name, tensor in load_file(path).items()} for path in files(home)]


def complaints(records):
    """Return the texts of our own warnings: of files that another test left open, the collector warns at any time."""
    return [str(each.message) for each in records if issubclass(each.category, Degraded)]


def engine_on(
    folder: Path,
    home: Path | None,
    settings=None,
    operations=None,
    dtype=torch.float32,
    limit=1 << 30,
    chunk=CHUNK,
    room=0,
    kv=BF16,
):
    """Make an engine with a tiny model, with a prompt cache in `home`, and reserve sessions of `room` tokens.

    `kv` is the format of keys and values.
    """
    checkpoint, operations = FolderCheckpoint(folder), operations or TorchOperations()
    model = load_model(checkpoint, dtype, CPU, lambda done, total: None, operations)
    model.kv = kv
    link = make_link() if settings is None or settings.disk is None else PoisonedDisk()
    stores = None if settings is None else TieredStoreFactory(operations, CPU, settings, link, kv=kv)
    prompts = None
    if home is not None:
        home.mkdir(exist_ok=True)
        digest = weights_digest(checkpoint.files(), home / "weights.json")
        prompts = PromptCache(PromptFolder(home, limit), digest, "tiny", 0)
        prompts.label = "a prompt"
    engine = Engine(model, (), chunk, None, stores, prompts)
    engine.reserve(room)
    return engine


def said(engine, prompt, method="ar", on_event=lambda event: None, **changes):
    """Return the tokens after a prompt, and how many tokens of it were restored from disk; settings may be changed."""
    out, restored = [], 0
    settings = Speculation(method, **{"budget": 64, "chunk": 16, "sink": 16} | changes)
    for event in engine.generate(prompt, Sampling(temperature=0), GenerationConfig(max_new_tokens=NEW), settings):
        on_event(event)
        if isinstance(event, Tokens):
            out += event.ids
        elif isinstance(event, Restored):
            restored += event.tokens
    return out, restored


def _answer(pipe, folder, home, prompt, largest_file, limit):
    torch.set_num_threads(1)
    if largest_file is not None:  # to a write call this looks like a full disk
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    saving.PATIENCE = 1000.0  # see fixtures.patience_with_disks
    engine = engine_on(folder, home, limit=limit)
    pipe.send("ready")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", Degraded)
        answer = said(engine, prompt)
    pipe.send((*answer, [str(each.message) for each in caught]))


class Process:
    """Another process that loads the tiny model, reports that it is ready, and then generates."""

    def __init__(self, folder: Path, home: Path, prompt, largest_file=None, limit=1 << 30):
        start_server()
        self._pipe, theirs = CONTEXT.Pipe()
        args = (theirs, folder, home, prompt, largest_file, limit)
        self._process = CONTEXT.Process(target=_answer, args=args, daemon=True)
        self._process.start()
        theirs.close()
        assert self._pipe.recv() == "ready"

    def answer(self):
        """Return tokens, how many were restored from disk, and warnings."""
        found = self._pipe.recv()
        self._process.join()
        return found

    def kill(self, after: float):
        """Kill the process (SIGKILL) after so many seconds; return whether it had answered by then."""
        done = self._pipe.poll(after)
        self._process.kill()
        self._process.join()
        with suppress(EOFError, ConnectionError):
            return done and bool(self._pipe.recv())
        return False
