"""Signals that come at a moment when an exception would be lost."""

import signal
import time

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from triforce_cli import signals


@pytest.fixture
def listening():
    """The command's handlers, undone after the test."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    signals.listen()
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_while_safetensors_reads_is_answered_behind_it(tmp_path, monkeypatch, listening, number, raised):
    """Safetensors asks torch's storage for a slice; an exception from there would become a ValueError."""
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.arange(6.0)}, path)
    found, signals_left, sliced = [], [number], torch.storage.UntypedStorage.__getitem__

    def interrupted(storage, *args):
        if signals_left:
            (lambda: signal.raise_signal(signals_left.pop()))()  # torch's storage may have called something else
        return sliced(storage, *args)

    # The handler sees the file of the code that runs, which is torch's own but for this test.
    code = interrupted.__code__.replace(co_filename=torch.storage.__file__)
    interrupted.__code__ = code
    monkeypatch.setattr(torch.storage.UntypedStorage, "__getitem__", interrupted)

    start = time.monotonic()

    def read():
        with safe_open(path, framework="pt") as file:
            found.append(file.get_tensor("weight"))
        time.sleep(60)

    with pytest.raises(raised):
        read()
    assert time.monotonic() - start < 30, "the signal did not interrupt what blocked"
    assert torch.equal(found[0], torch.arange(6.0))
