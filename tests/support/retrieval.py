"""A full cache and a retrieval cache over it, with their runners, on models with 32 tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from offload.caches.selected import SelectedCache
from offload.caches.selection import Refresh, RetrievalSelector
from offload.kernels.attention import attend, attend_causal, merge
from offload.kernels.ops import Operations
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.weights import load_model
from offload.sequence import TokenSequence
from offload.speculation.passes.runner import Runner
from offload.speculation.passes.selected_runner import SelectedRunner
from tests.support.models import make_hf_model
from tests.support.offloading import CPU

VOCAB, TAIL, SINK, PREFILL_CHUNK = 32, 32, 4, 64


def load(folder, kv_heads: int, dtype=torch.float32, operations: Operations | None = None):
    make_hf_model("llama", vocab_size=VOCAB, num_key_value_heads=kv_heads).save_pretrained(folder)
    return load_model(FolderCheckpoint(folder), dtype, CPU, lambda done, total: None, operations)


def ids(count, seed=0):
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass(frozen=True)
class RetrievalSetup:
    """How a test file makes its retrieval caches: sizes in tokens."""

    cache_class: type[SelectedCache]
    chunk: int
    budget: int
    capacity: int

    def full(self, model) -> Runner:
        return Runner(model, model.new_cache(self.capacity), PREFILL_CHUNK)

    def pair(self, model, every=None, selector=RetrievalSelector, budget=None):
        """Make the runners of an empty full cache and of a retrieval cache over it."""
        full = self.full(model)
        sizes = (budget or self.budget, self.chunk, TAIL)
        cache = self.cache_class(full.cache, selector(SINK, self.chunk), Refresh(every), *sizes)
        return full, SelectedRunner(full, cache)

    def prefilled(self, model, count, **options):
        """Make the runners, and a sequence of `count` tokens that the full cache has run."""
        full, middle = self.pair(model, **options)
        sequence = TokenSequence(ids(count))
        list(full.prefill(sequence))
        return full, middle, sequence

    def scores(self, full: Runner, chunks: int):
        """Return the defined score of each chunk, `[layers * kv_heads, chunks]`; infinite if always selected."""
        dtype = full.model.dtype
        keys = full.cache.store.read(0, chunks * self.chunk)[0].float().unflatten(2, (-1, self.chunk))
        query = full.cache.query().float().unflatten(1, (full.model.shape.kv_heads, -1)).mean(2)
        means, query = (x.to(dtype).float() for x in (keys.mean(3), query))
        scores = torch.einsum("lkd,lkcd->lkc", query, means).flatten(0, 1)
        scores[:, 0] = scores[:, -1] = torch.inf
        return scores


def attend_table_by_torch(q, keys, values, table, chunk, lengths):
    """Attend as `accumulate.attend_table`, without Triton: gather the chunks and the tail of each head."""
    seen, slots, tail = lengths.tolist() if torch.is_tensor(lengths) else (lengths[0], table.shape[1], lengths[1])
    own = torch.arange(tail, tail + seen - slots * chunk + len(q) - 1)
    chosen = (table[:, :slots].long().unsqueeze(-1) * chunk + torch.arange(chunk)).flatten(1)
    picked = torch.cat((chosen, own.expand(len(keys), -1)), 1).unsqueeze(-1).expand(-1, -1, keys.shape[-1])
    keys, values = keys.gather(1, picked), values.gather(1, picked)
    before = keys.shape[1] - len(q)
    parts = [attend_causal(q, keys[:, before:], values[:, before:])]
    return merge([*parts, attend(q, keys[:, :before], values[:, :before])] if before else parts).out


# Steps of a history, for `take_step`

CYCLE = st.tuples(st.just("cycle"), st.integers(0, 8), st.integers(0, 8))
LOOKUP = st.tuples(st.just("lookup"), st.integers(1, 8), st.integers(0, 8))
INTERRUPT = st.tuples(st.just("interrupt"), st.integers(1, 8), st.just(0))
RESTART = st.tuples(st.just("restart"), st.integers(1, 200), st.integers(0, 3))
PLAIN = st.tuples(st.just("plain"), st.integers(1, 20), st.just(0))


def take_step(full: Runner, middle: SelectedRunner, sequence: TokenSequence, step: tuple[str, int, int]) -> None:
    """Take one step of decoding; the full cache has run the committed tokens afterwards.

    ("cycle", n, m): the retrieval cache drafts n tokens, of which the full cache accepts up to m.
    ("lookup", n, m): the same with a draft that the retrieval cache has not run.
    ("interrupt", n, 0): a draft of n tokens is never verified. ("plain", n, 0): n tokens without a draft.
    ("restart", n, m): another sequence of the first n / 2 tokens and m new ones.
    """
    kind, first, second = step
    if kind in ("cycle", "lookup"):
        draft = ids(first, len(sequence))
        if kind == "cycle":
            for token in draft:
                middle.rows(sequence)
                sequence.extend([token])
            sequence.truncate(sequence.committed)
        full.rows(sequence, draft)
        sequence.extend([*draft[:second], 1])
        middle.observe(len(draft), min(second, len(draft)))
    elif kind == "interrupt":
        sequence.extend(ids(first, 7))
        middle.rows(sequence)
        sequence.truncate(sequence.committed)
    elif kind == "plain":
        for token in ids(first, 5):
            full.rows(sequence)
            sequence.extend([token])
    else:
        sequence.restart([*sequence.tokens[: first // 2], *ids(first, second)])
        list(full.prefill(sequence))
    sequence.commit()
    full.settle(sequence)
