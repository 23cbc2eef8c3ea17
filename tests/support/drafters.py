"""Every drafter on tiny models, decoding greedily so that a fresh one proposes the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

from offload.caches.factory import draft_cache, selected_cache
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.weights import load_model
from offload.sequence import TokenSequence
from offload.settings.config import Sampling, Speculation
from offload.speculation.auto.adaptive import AdaptiveScheduler
from offload.speculation.drafters.drafter import Drafter
from offload.speculation.drafters.model_drafter import ModelDrafter
from offload.speculation.drafters.ngram import LookupDrafter
from offload.speculation.levels.level import Level
from offload.speculation.passes.draft_runner import DraftRunner
from offload.speculation.passes.runner import Runner
from offload.speculation.passes.selected_runner import SelectedRunner
from offload.speculation.sampling.warp import Sampler
from tests.support.models import make_hf_model
from tests.support.offloading import CPU

VOCAB = 24  # few tokens: the text repeats itself, so that lookup has something to propose
# Caches large enough for every token: a smaller one would make a fresh drafter propose other tokens.
SETTINGS = Speculation("triforce", budget=400, chunk=4, window=400)
DRAFTERS = ["lookup", "draft model", "level", "level over lookup", "level over a draft model"]


@cache
def _model(seed: int, layers: int):
    with TemporaryDirectory() as folder:
        make_hf_model("llama", seed, vocab_size=VOCAB, num_hidden_layers=layers).save_pretrained(folder)
        return load_model(FolderCheckpoint(Path(folder)), torch.float32, CPU, lambda done, total: None)


class Subject(NamedTuple):
    """A drafter under test. `settle` must be called when the committed tokens have changed."""

    drafter: Drafter
    settle: Callable[[TokenSequence], None]


def new_subject(name: str, sequence: TokenSequence) -> Subject:
    """Make a drafter of one of the kinds in `DRAFTERS`, settled on a sequence."""
    sampler = Sampler(Sampling(temperature=0), 0, VOCAB, CPU)
    draft_model = _model(1, 1)
    runner = DraftRunner(draft_model, draft_cache(draft_model, SETTINGS), 16)
    draft = ModelDrafter(runner, sampler)
    if name in ("lookup", "draft model"):
        return Subject(LookupDrafter() if name == "lookup" else draft, lambda sequence: None)
    target = _model(0, 2)
    full = Runner(target, target.new_cache(400), 64)
    middle = SelectedRunner(full, selected_cache(full.cache, SETTINGS))
    below = {"level": [], "level over lookup": [LookupDrafter()], "level over a draft model": [draft]}[name]
    pace, ticks = AdaptiveScheduler(below, gamma=3 if below else None), itertools.count()
    level = Level("retrieval", middle, sampler, pace, lambda: next(ticks))
    subject = Subject(level, lambda sequence: list(full.prefill(sequence)))
    subject.settle(sequence)
    return subject
