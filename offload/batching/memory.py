"""The keys and values of a batch's sequences, in pages of one pool: what two prompts begin with is there once."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import OutOfMemory
from ..kernels.native.structs import BLOCK
from ..memory.paged_store import PagedStore, PagePool, pages_for
from ..model.decoder import Model
from ..sequence import common_prefix
from ..settings.kv_formats import KV_FORMATS, PLAIN_KV
from ..speculation.passes.runner import Runner
from ..system.machine import free_host_memory
from ..units import size_text
from .lane import Lane

LEAST_SHARED = 256  # tokens: to wait until another sequence has run fewer is not worth it
FREE_SHARE = 0.9  # of the free memory that pages may take; passes need some, too


@dataclass(eq=False)
class Allocation:
    """A sequence with pages in the pool: its prompt's `ids`, and the `length` that it and its answer may reach.

    `finished`: tokens in the pages of a sequence that has ended.
    """

    ids: Sequence[int]
    length: int
    store: PagedStore
    runner: Runner | None = None
    finished: int = 0

    @property
    def num_cached(self) -> int:
        """Return how many of its tokens have been run."""
        return self.finished if self.runner is None else self.runner.num_cached


def has_pages(model: Model) -> bool:
    """Return whether sequences of a model can have their keys and values in pages of a `BatchMemory`."""
    shape = model.shape
    is_paged = shape.kv_layers == shape.layers and not shape.caps_scores
    return is_paged and model.operations.kernel is not None and KV_FORMATS[model.kv] is PLAIN_KV


class BatchMemory:
    """Gives sequences their pages; one that begins like another shares them with it.

    The last sequence that has left keeps its pages, for the next one, until they are needed.
    """

    def __init__(self, model: Model, sequences: int, longest: int, limit: int | None = None, unit: int = 1) -> None:
        """Have room for so many `sequences` of up to `longest` tokens, within `limit` bytes.

        Without a limit, use up to most of the free memory. The model must run on the native kernel.
        Share multiples of `unit` tokens: a prompt cache restores whole blocks, and must not write to shared pages.
        """
        shape, kernel = model.shape, model.operations.kernel
        assert kernel is not None, "pages need the native kernel"
        if limit is None:
            limit = int(free_host_memory() * FREE_SHARE) // model.group.mates
        self._page_bytes = shape.kv_bytes(BLOCK, model.dtype.itemsize)
        # Ranks that wait for room must do so together, and their shares of the heads may be uneven.
        fitting = min(model.group.collect(limit // self._page_bytes))
        self._pages = min(fitting, (sequences + 1) * pages_for(longest))  # one more, that has ended last
        self._pool = PagePool(kernel, shape, self._pages, model.dtype)
        self._rope_depends_on_length = shape.rope_depends_on_length
        self._unit = unit
        self._allocations: list[Allocation] = []
        self._last_finished: Allocation | None = None

    def allocate(
        self, ids: Sequence[int], length: int, spare: int, lane: Lane, fresh: int = 1
    ) -> tuple[Allocation, int]:
        """Return a sequence's pages, and how many tokens, the first of its prompt `ids`, are in them already.

        They are for the `length` of prompt and answer, and `spare` tokens of a tree. The last `fresh` tokens of the
        prompt are not shared: the sequence runs them.

        Waits for room, and for those tokens while another sequence runs them.
        Raises OutOfMemory if there is too little room for this sequence alone.
        """
        capacity = length + spare
        if (needed := pages_for(capacity)) > self._pages:
            size, room = (size_text(count * self._page_bytes) for count in (needed, self._pages))
            message = f"{capacity:,} tokens of keys and values take {size}, and there is room for {room}"
            raise OutOfMemory(message, "shorten the prompt, or ask for fewer new tokens")
        while True:
            other, shared = self._longest_beginning(ids[: max(len(ids) - fresh, 0)], length)
            has_room = needed - shared // BLOCK <= self._pool.num_free
            if has_room and (other is None or other.num_cached >= shared):
                store = PagedStore(self._pool, capacity, None if other is None else other.store, shared)
                self._allocations.append(allocation := Allocation(ids, length, store))
                return allocation, shared
            if has_room or not self._free_last():
                lane.pause()

    def free(self, allocation: Allocation) -> None:
        """Note that a sequence has ended."""
        self._allocations.remove(allocation)
        self._free_last()
        if allocation.runner is None:
            allocation.store.release()
        else:
            allocation.finished, allocation.runner = allocation.num_cached, None  # its other memory is freed
            self._last_finished = allocation

    def _longest_beginning(self, ids: Sequence[int], length: int) -> tuple[Allocation | None, int]:
        """Return the sequence whose pages to share, and how many tokens."""
        best, most = None, LEAST_SHARED - 1
        for other in (*self._allocations, *filter(None, [self._last_finished])):
            if self._rope_depends_on_length and other.length != length:
                continue
            shared = common_prefix(ids, other.ids)
            if other.runner is None:
                shared = min(shared, other.finished)
            shared -= shared % self._unit
            if shared > most:
                best, most = other, shared
        return best, most if best else 0

    def _free_last(self) -> bool:
        """Free the pages of the sequence that left last; return whether there was one."""
        left, self._last_finished = self._last_finished, None
        if left is not None:
            left.store.release()
        return left is not None
