"""How many tokens are selected together: the setting, what a store can select, and a limit on their number."""

import pytest

from offload.architecture.dims import Dimensions
from offload.loading.hub.download import dimensions
from offload.planning.memory import estimate
from offload.settings.config import Speculation
from offload.settings.method_sizes import MOST_CHUNKS, selected_chunk

SETTINGS = Speculation(method="triforce")
K = 2**10


@pytest.mark.parametrize(
    ("tokens", "chunk"),
    [(0, 16), (8 * K, 16), (256 * K, 16), (256 * K + 1, 32), (512 * K, 32), (K * K, 64), (K * K + 1, 128)],
)
def test_chunks_grow_where_there_would_be_too_many(tokens, chunk):
    assert selected_chunk(SETTINGS, 16, tokens=tokens) == chunk
    assert -(-tokens // chunk) <= MOST_CHUNKS


def test_grown_chunks_still_divide_a_page():
    assert selected_chunk(Speculation(chunk=24), 8, span=512, tokens=K * K) == 128
    assert selected_chunk(Speculation(chunk=24), 8, span=512) == 32


def test_the_index_of_a_million_tokens_takes_less_than_200_mb():
    shape: Dimensions = dimensions("smollm2-135m")
    index = {}
    for tokens in (128 * K, 512 * K, K * K):
        need = estimate(shape, tokens, SETTINGS, device="cpu", itemsize=2, prefill_chunk=512, in_place=True)
        table = estimate(shape, 8 * K, SETTINGS, device="cpu", itemsize=2, prefill_chunk=512, in_place=True)
        index[tokens] = need.retrieval - table.retrieval + shape.kv_bytes(8 * K // 16, 2) // 2
    assert index[128 * K] == pytest.approx(94e6, rel=0.01)
    assert index[512 * K] == pytest.approx(index[K * K], rel=0.01) == pytest.approx(189e6, rel=0.01)
