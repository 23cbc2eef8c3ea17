"""A group over torch.distributed: nccl between GPUs, gloo between CPUs and for all decisions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import RankLost, RankMissing, SettingsError

_FAREWELL_S = 2.0  # the other ranks' goodbyes may still be in flight
_TIMEOUT = timedelta(days=7)  # the user may page through the output; a dead rank is noticed by other means


class Ranks:
    """A `Group` of processes, which find each other by the environment that torchrun sets (`env://`).

    Args:
        device: the device of tensors that are summed or gathered.
        timeout: seconds within which all ranks must join.
        lost: called once, in a thread, with a rank that has ended without `leave`.
        local, mates: index of this rank among those of its machine, and their number.

    Raises RankMissing.
    """

    def __init__(
        self,
        device: torch.device,
        timeout: float = 300.0,
        lost: Callable[[int], None] | None = None,
        local: int = 0,
        mates: int = 1,
    ) -> None:
        self.local, self.mates = local, mates
        with _rank_missing(timeout):
            dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            _check_devices(device, self.size)
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
        found = torch.empty((self.size, len(x), widest), dtype=x.dtype, device=x.device)
        with _rank_lost():
            dist.all_gather(list(found.unbind()), padded.contiguous(), group=self._data)
        return torch.cat([part[:, :width] for part, width in zip(found, widths, strict=True)], dim=1)

    def agree(self, numbers: Sequence[float]) -> list[float]:
        values = torch.tensor(numbers, dtype=torch.float64)
        with _rank_lost():
            dist.broadcast(values, 0, group=self._control)
        return values.tolist()

    def broadcast(self, value: Any) -> Any:
        box = [value if self.rank == 0 else None]
        with _rank_lost():
            dist.broadcast_object_list(box, 0, group=self._control)
        return box[0]

    def collect(self, value: Any) -> list[Any]:
        found = [None] * self.size
        with _rank_lost():
            dist.all_gather_object(found, value, group=self._control)
        return found

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


def _check_devices(device: torch.device, size: int) -> None:
    """Raise SettingsError unless all ranks have the same kind of device: their groups would differ, and block."""
    kinds = [None] * size
    dist.all_gather_object(kinds, device.type)
    if len(set(kinds)) > 1:
        raise SettingsError(
            f"some ranks are on a GPU and some on a CPU: {', '.join(kinds)}", "use --device on all nodes"
        )


@contextmanager
def _rank_missing(timeout: float) -> Iterator[None]:
    """Raise RankMissing in place of torch's errors."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RankMissing(
            f"the ranks did not come together within {timeout:g} s: {reason[:200]}",
            "start the same command on every node, with the same address; GLOO_SOCKET_IFNAME names the network to use",
        ) from error


@contextmanager
def _rank_lost() -> Iterator[None]:
    """Raise RankLost in place of gloo's and nccl's errors."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # gloo and nccl raise nothing more specific
        reason = (str(error).strip().splitlines() or [""])[0]
        raise RankLost("another rank has ended", "see what it said") from RuntimeError(reason)
