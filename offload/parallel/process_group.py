"""A group over torch.distributed: nccl between GPUs, gloo between CPUs and for everything that is decided."""

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

_FAREWELL_S = 2.0  # the others' last words may still be on their way
_PATIENCE = timedelta(days=7)  # the user may page through the output; a rank that has died is noticed otherwise


class Ranks:
    """See `Group`. Ranks find each other by the environment that torch's launcher makes (`env://`).

    Args:
        device: where tensors are that are summed.
        timeout: seconds until all must have joined.
        backend: of the sums; None for nccl on a GPU, gloo on a CPU.
        lost: called once, by a thread of its own, with a rank that has ended without `leave`.
        local, mates: number of this rank among those on its machine, and how many they are.

    Raises RankMissing.
    """

    def __init__(
        self,
        device: torch.device,
        timeout: float = 300.0,
        backend: str | None = None,
        lost: Callable[[int], None] | None = None,
        local: int = 0,
        mates: int = 1,
    ) -> None:
        self.local, self.mates = local, mates
        with _joining(timeout):
            dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            _refuse_mixture(device, self.size)
            self._deciding = dist.new_group(backend="gloo", timeout=_PATIENCE)
            backend = backend or ("nccl" if device.type == "cuda" else "gloo")
            self._summing = self._deciding
            if backend != "gloo":
                self._summing = dist.new_group(backend=backend, timeout=_PATIENCE)
            self._watching = dist.new_group(backend="gloo", timeout=_PATIENCE) if lost else None
            if device.type == "cuda":
                torch.cuda.set_device(device)  # nccl asks which one is this rank's
        self._left = False
        self._watchers: dict[int, threading.Thread] = {}
        if lost is not None:
            for peer in range(1, self.size) if self.rank == 0 else range(1):
                thread = threading.Thread(target=self._watch, args=(peer, lost), daemon=True, name="watch")
                self._watchers[peer] = thread
                thread.start()

    def sum(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        with _together():
            dist.all_reduce(x, group=self._summing)
        return x

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        widest = max(widths)
        padded = x if x.shape[1] == widest else torch.nn.functional.pad(x, (0, widest - x.shape[1]))
        found = torch.empty((self.size, len(x), widest), dtype=x.dtype, device=x.device)
        with _together():
            dist.all_gather(list(found.unbind()), padded.contiguous(), group=self._summing)
        return torch.cat([part[:, :width] for part, width in zip(found, widths, strict=True)], dim=1)

    def agree(self, numbers: Sequence[float]) -> list[float]:
        said = torch.tensor(numbers, dtype=torch.float64)
        with _together():
            dist.broadcast(said, 0, group=self._deciding)
        return said.tolist()

    def broadcast(self, value: Any) -> Any:
        box = [value if self.rank == 0 else None]
        with _together():
            dist.broadcast_object_list(box, 0, group=self._deciding)
        return box[0]

    def collect(self, value: Any) -> list[Any]:
        found = [None] * self.size
        with _together():
            dist.all_gather_object(found, value, group=self._deciding)
        return found

    def leave(self) -> None:
        """This rank has done its part. Without it, its end counts as a failure."""
        self._left = True
        for peer in self._watchers:
            with suppress(RankLost), _together():  # one that has gone has no need of it
                dist.send(torch.ones(1), peer, group=self._watching)
        for thread in self._watchers.values():
            thread.join(_FAREWELL_S)

    def _watch(self, peer: int, lost: Callable[[int], None]) -> None:
        """Until a farewell comes; the connection of a rank that dies is closed at once, by its system."""
        try:
            dist.recv(torch.empty(1), peer, group=self._watching)
        except RuntimeError:
            if not self._left:
                lost(peer)


def _refuse_mixture(device: torch.device, size: int) -> None:
    """Ranks on GPUs make other groups than ranks on CPUs, and would wait for each other. Raises SettingsError."""
    kinds = [None] * size
    dist.all_gather_object(kinds, device.type)
    if len(set(kinds)) > 1:
        raise SettingsError(
            f"some ranks are on a GPU and some on a CPU: {', '.join(kinds)}", "use --device on all nodes"
        )


@contextmanager
def _joining(timeout: float) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RankMissing(
            f"the ranks did not come together within {timeout:g} s: {reason[:200]}",
            "start the same command on every node, with the same address; GLOO_SOCKET_IFNAME names the network to use",
        ) from error


@contextmanager
def _together() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # gloo's and nccl's: there is nothing else that could go wrong here
        reason = (str(error).strip().splitlines() or [""])[0]
        raise RankLost("another rank has ended", "see what it said") from RuntimeError(reason)
