"""Pages of keys and values: how many tokens and bytes are moved at once, and what an offloaded cache takes.

Plans count with these sizes, and offload/memory allocates by them; tests hold the two together. Imports nothing heavy.
"""

from ..settings.kv_formats import BF16, KV_FORMATS, PACKED_KV, PLAIN_KV, PLANE_KV
from .dims import Dimensions
from .kv_formats import format_bytes, packed_page_bytes

PAGE_BYTES = 8 * 2**20  # of one layer: large enough for the link's full rate, small enough for two staging buffers
LEAST_PAGE, LARGEST_PAGE = 512, 1024  # tokens; the native kernel sums over so many in one piece
DEQUANTIZED_BYTES = 64 * 2**20  # of a quantised weight that a GPU dequantises at once, for more rows than a few
SCORED_BYTES = 64 * 2**20  # of mean keys in fp32 that a GPU computes at once
GATHERED_BYTES = 64 * 2**20  # of selected chunks that are copied to the device at once, through pinned host memory
PACKED_BYTES = 64 * 2**20  # of pages that a GPU packs at once
SLOTS = 2  # for open pages, of every offloaded layer
# A streamed page takes Python some 0.1 ms, in which a fast link copies 4 MiB: pages are copied together, up to so much.
COPY_BYTES = 16 * 2**20
COPY_S = 0.6e-3  # or as much as the link copies in that time, if it is more
RING_BUFFERS = 4  # for copies of so many bytes: one is read, the others are under way
DISK_READ_BYTES = 4 * 2**20  # that are read from disk at once: large enough for the full rate of an NVMe drive
BOUNCE_BUFFERS = 3  # of so many bytes, in pinned memory, through which a GPU's pages on disk pass


def page_tokens(shape: Dimensions, itemsize: int) -> int:
    """Return the tokens of a page: their KV, of one layer, is copied over the link at once."""
    token_bytes = shape.layer_kv_bytes(1, itemsize)
    return min(max(PAGE_BYTES // token_bytes // LEAST_PAGE * LEAST_PAGE, LEAST_PAGE), LARGEST_PAGE)


def disk_buffers(page_bytes: int) -> int:
    """Return the pages that are prefetched from disk: enough for two large reads, one in use while the other comes."""
    return min(max(2, 2 * DISK_READ_BYTES // page_bytes), 16)


def copied_pages(page_bytes: int, pages: int, copy_bytes: int = COPY_BYTES) -> int:
    """Return how many of a layer's `pages` are copied over the link at once: `copy_bytes` or more, if there are."""
    return max(min(-(-copy_bytes // page_bytes), pages), 1)


def copy_bytes_for(link: float) -> int:
    """Return the bytes that are copied at once over a link of so many bytes a second."""
    return max(COPY_BYTES, round(link * COPY_S))


def page_bytes(shape: Dimensions, pages: int, page: int, itemsize: int, kv: str = BF16) -> int:
    """Return the bytes of `pages` pages of one layer, of `page` tokens each."""
    size = packed_page_bytes(shape, page) if KV_FORMATS[kv] is PACKED_KV else format_bytes(shape, kv, page, itemsize)
    return pages * size


def host_page_bytes(
    shape: Dimensions, layers: int, tokens: int, page: int, itemsize: int, kv: str = BF16, in_planes: bool = False
) -> int:
    """Return the pinned bytes for the pages of `layers` offloaded layers with a capacity of `tokens`.

    `in_planes`: of plane B of packed ones.
    """
    pages = -(-tokens // page)
    if in_planes:
        packed, plane = (format_bytes(shape, kind, page, itemsize) for kind in (kv, PLANE_KV.name))
        return layers * pages * (packed - plane)
    return layers * page_bytes(shape, pages, page, itemsize, kv)


def staging_bytes(
    shape: Dimensions, layers: int, buffers: int, page: int, itemsize: int, kv: str = BF16, slots: int = SLOTS
) -> int:
    """Return the device bytes for prefetched pages, and for the open pages of `layers` offloaded layers."""
    return page_bytes(shape, buffers + slots * layers, page, itemsize, kv)


def packing_bytes(shape: Dimensions, layers: int, page: int) -> int:
    """Return the device bytes while a GPU packs a page of each of `layers` offloaded layers, some at once."""
    return page_bytes(shape, layers, page, 2, PACKED_KV.name) + 2 * max(PACKED_BYTES, page_bytes(shape, 1, page, 2))


def open_slots(tokens: int, page: int, kv: str) -> int:
    """Return the slots for open pages; of quantised ones, as many as a pass over `tokens` writes to."""
    return SLOTS if KV_FORMATS[kv] is PLAIN_KV else max(SLOTS, -(-tokens // page) + 1)


def prefill_bytes(shape: Dimensions, end: int, chunk: int, page: int, itemsize: int) -> int:
    """Return the device bytes of buffers for a pass over more tokens than a page has, up to position `end`.

    One layer's keys and values of all tokens, and two buffers for the pages of a chunk on their way to the host.
    """
    return page_bytes(shape, -(-end // page) + 2 * (-(-chunk // page) + 1), page, itemsize)


def host_mean_key_bytes(shape: Dimensions, layers: int, tokens: int, chunk: int, page: int, itemsize: int) -> int:
    """Return the pinned bytes for mean keys of `layers` offloaded layers with a capacity of `tokens`."""
    return layers * mean_key_bytes(shape, -(-tokens // page) * page, chunk, itemsize)


def mean_key_bytes(shape: Dimensions, tokens: int, chunk: int, itemsize: int) -> int:
    """Return the bytes of one layer's mean keys: on the device while a prefill makes them, then on the host."""
    return shape.layer_kv_bytes(tokens // chunk, itemsize) // 2
