"""A group over torch.distributed: nccl between GPUs, gloo between CPUs and for all decisions.

Values travel as JSON in tensors of bytes. torch's own collectives of objects unpickle what they receive: whoever can
write to a connection between ranks could run code on them. JSON can only be wrong.
"""

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import RankLost, RankMissing, SettingsError
from ..short_repr import first_line


def _bytes(value: Any) -> Tensor:
    # A name of a file that is not UTF-8 has surrogates, which json.loads takes back.
    text = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _value(data: Tensor) -> Any:
    return json.loads(data.numpy().tobytes())


_FAREWELL_S = 2.0  # the other ranks' goodbyes may still be in flight
_TIMEOUT = timedelta(days=7)  # the user may page through the output; a dead rank is noticed by other means


class Ranks:
    """A `Group` of processes, whose ranks and number are in the environment, as torchrun sets it.

    Ranks of one machine find each other by a file, and listen on its loopback interface alone. Ranks of several
    machines find each other at torchrun's address (`env://`): who reaches it can run code on all of them.

    Args:
        device: the device of tensors that are summed or gathered.
        timeout: seconds within which all ranks must join.
        lost: called once, in a thread, with a rank that has ended without `leave`.
        local, mates: index of this rank among the ranks of its machine, and their number.
        folder: where the ranks of one machine meet. Only its owner may write to it.

    Raises RankMissing.
    """

    def __init__(
        self,
        device: torch.device,
        timeout: float = 300.0,
        lost: Callable[[int], None] | None = None,
        local: int = 0,
        mates: int = 1,
        folder: Path | None = None,
    ) -> None:
        self.local, self.mates = local, mates
        with _rank_missing(timeout):
            where = {} if folder is None else _meet_in(folder)
            dist.init_process_group("gloo", timeout=timedelta(seconds=timeout), **where)
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            self._control = dist.new_group(backend="gloo", timeout=_TIMEOUT)
            self._data = self._control
            if device.type == "cuda":
                self._data = dist.new_group(backend="nccl", timeout=_TIMEOUT)
            self._liveness = dist.new_group(backend="gloo", timeout=_TIMEOUT) if lost else None
            if device.type == "cuda":
                torch.cuda.set_device(device)  # nccl uses the current device
        self._left = False
        self._watchers: dict[int, threading.Thread] = {}
        if lost is not None:
            for peer in range(1, self.size) if self.rank == 0 else range(1):
                thread = threading.Thread(target=self._watch, args=(peer, lost), daemon=True, name="watch")
                self._watchers[peer] = thread
                thread.start()

    def sum(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        with _rank_lost():
            dist.all_reduce(x, group=self._data)
        return x

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        widest = max(widths)
        padded = x if x.shape[1] == widest else torch.nn.functional.pad(x, (0, widest - x.shape[1]))
        parts = torch.empty((self.size, len(x), widest), dtype=x.dtype, device=x.device)
        with _rank_lost():
            dist.all_gather(list(parts.unbind()), padded.contiguous(), group=self._data)
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def agree(self, numbers: Sequence[float]) -> list[float]:
        values = torch.tensor(numbers, dtype=torch.float64)
        with _rank_lost():
            dist.broadcast(values, 0, group=self._control)
        return values.tolist()

    def broadcast(self, value: Any) -> Any:
        data = _bytes(value) if self.rank == 0 else torch.empty(0, dtype=torch.uint8)
        length = torch.tensor(len(data))
        with _rank_lost():
            dist.broadcast(length, 0, group=self._control)
            data = data if self.rank == 0 else torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(data, 0, group=self._control)
        return _value(data)

    def collect(self, value: Any) -> list[Any]:
        data, lengths = _bytes(value), torch.empty(self.size, dtype=torch.int64)
        with _rank_lost():
            dist.all_gather(list(lengths.unbind()), torch.tensor(len(data)), group=self._control)
            rows = torch.empty((self.size, int(lengths.max())), dtype=torch.uint8)
            padded = torch.nn.functional.pad(data, (0, rows.shape[1] - len(data)))
            dist.all_gather(list(rows.unbind()), padded, group=self._control)
        return [_value(row[:length]) for row, length in zip(rows, lengths.tolist(), strict=True)]

    def leave(self) -> None:
        """Say goodbye to the other ranks. A rank that ends without it counts as lost."""
        self._left = True
        for peer in self._watchers:
            with suppress(RankLost), _rank_lost():  # a peer that has ended needs no goodbye
                dist.send(torch.ones(1), peer, group=self._liveness)
        for thread in self._watchers.values():
            thread.join(_FAREWELL_S)

    def _watch(self, peer: int, lost: Callable[[int], None]) -> None:
        """Wait for a peer's goodbye; if it dies, its system closes the connection at once, and `lost` is called."""
        try:
            dist.recv(torch.empty(1), peer, group=self._liveness)
        except RuntimeError:
            if not self._left:
                lost(peer)


def _meet_in(folder: Path) -> dict[str, Any]:
    """Return where torch finds the other ranks of this machine; make gloo and nccl listen on loopback alone."""
    # Without it they listen on what the host's name resolves to, or on the first network interface.
    addresses = psutil.net_if_addrs().items()
    loopback = next((name for name, own in addresses if any(address.address == "127.0.0.1" for address in own)), None)
    if loopback is None:
        raise SettingsError("ranks on one machine need its loopback interface, and there is none", "ip link set lo up")
    os.environ["GLOO_SOCKET_IFNAME"] = loopback
    os.environ["NCCL_SOCKET_IFNAME"] = f"={loopback}"  # this name, and not all that begin with it
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return {"store": dist.FileStore(str(folder / "store"), size), "rank": rank, "world_size": size}


@contextmanager
def _rank_missing(timeout: float) -> Iterator[None]:
    """Raise RankMissing in place of torch's errors."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise RankMissing(
            f"the ranks did not come together within {timeout:g} s: {first_line(error)[:200]}",
            "start the same command on every node, with the same address; GLOO_SOCKET_IFNAME names the network to use",
        ) from error


@contextmanager
def _rank_lost() -> Iterator[None]:
    """Raise RankLost in place of gloo's and nccl's errors, and of nothing that went wrong on this rank's own GPU."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # gloo and nccl raise nothing more specific
        reason = (str(error).strip().splitlines() or [""])[0]
        if reason.startswith("CUDA error"):  # of an earlier kernel: a collective is where it is noticed
            raise
        raise RankLost("another rank has ended", "see what it said") from RuntimeError(reason)
