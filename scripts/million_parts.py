"""The parts that scripts/bench_million.py measures: what a prompt of a million tokens makes large."""

from __future__ import annotations

import json
import resource
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import psutil
import torch
from safetensors.torch import save_file

from offload import EngineConfig, open_model
from offload.api.opened_model import OpenModel
from offload.caches.factory import selected_cache
from offload.events import Prefilled, Tokens
from offload.kernels.native.threads import torch_on_one_thread
from offload.loading.prompt_checks import token_ids
from offload.memory.factory import TieredStoreFactory
from offload.memory.link import SimulatedLink
from offload.memory.tier_settings import TierSettings
from offload.metrics import Meter
from offload.model.decoder import Model
from offload.parallel import ALONE
from offload.prompt_cache.block import write_block
from offload.prompt_cache.chain import Prompt, Storage
from offload.prompt_cache.entries import entries
from offload.prompt_cache.fingerprint import TOKENS
from offload.prompt_cache.folder import Header, PromptFolder
from offload.sequence import TokenSequence, common_prefix
from offload.settings.config import EXACT, Sampling, Speculation
from offload.speculation.drafters.ngram import LookupDrafter
from offload.speculation.passes.runner import Runner
from offload.speculation.passes.selected_runner import SelectedRunner
from offload.speculation.sampling.penalties import Penalties

ROOT = Path(__file__).parents[1]
LAYERS = 4
ROWS = 8  # of a verification
SPARE = 1024  # tokens that may follow
_PIECE = 2**14  # tokens that are restored at once

Cost = tuple[str, float, int | None]  # of a part: its name, seconds, bytes


def timed(work: Callable[[], object], repeats: int = 1) -> float:
    """Return the median seconds of some work."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def resident() -> int:
    """Return the bytes of this process in memory."""
    return psutil.Process().memory_info().rss


@dataclass
class Subject:
    """A sequence of so many tokens; its model and full cache are made when a part needs them."""

    folder: Path
    tokens: int
    layers: int
    ids: list[int] = field(repr=False)
    resident: int  # bytes of the process before there was a model

    @cached_property
    def opened(self) -> OpenModel:
        write_model(self.folder / "model", self.layers, self.tokens + SPARE)
        return open_model(EngineConfig(model=str(self.folder / "model"), device="cpu"))

    @cached_property
    def model(self) -> Model:
        return self.opened.load().model

    @cached_property
    def full(self) -> Runner:
        """The full cache with all tokens but the last restored."""
        runner = Runner(self.model, self.model.new_cache(self.tokens + SPARE))
        restore(runner, self.ids[:-1])
        runner.rows(TokenSequence(self.ids))
        return runner

    def close(self) -> None:
        """Free memory and disk."""
        for name in ("full", "model", "opened"):
            self.__dict__.pop(name, None)
        self.ids = []
        shutil.rmtree(self.folder, ignore_errors=True)


def make_subject(folder: Path, tokens: int, layers: int) -> Subject:
    """Return a subject; its tokens are those of a book that is repeated."""
    folder.mkdir(parents=True)
    book = open_model(EngineConfig()).tokenizer.encode(_book(), special_tokens=False)
    ids = (book * (tokens // len(book) + 1))[:tokens]
    return Subject(folder, tokens, layers, ids, resident())


def _book() -> str:
    return (ROOT / "examples" / "frankenstein.txt").read_text("utf-8")


def write_model(folder: Path, layers: int, context: int) -> None:
    """Write a model of the embedded one's shape with random weights, for a longer context."""
    shape = open_model(EngineConfig()).checkpoint.shape
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": 1e7,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
    hidden, inner = shape.hidden, shape.intermediate
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {"self_attn.q_proj": (query, hidden), "self_attn.o_proj": (hidden, query)}
    sizes |= {f"self_attn.{name}_proj": (key, hidden) for name in "kv"}
    sizes |= {f"mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")} | {"mlp.down_proj": (hidden, inner)}
    draw = torch.Generator().manual_seed(0)
    new = lambda *size: (0.02 * torch.randn(size, generator=draw)).bfloat16()  # noqa: E731
    tensors = {
        "model.embed_tokens.weight": new(shape.vocab, hidden),
        "model.norm.weight": torch.ones(hidden).bfloat16(),
    }
    for layer in range(layers):
        name = f"model.layers.{layer}"
        tensors |= {f"{name}.{part}.weight": new(*size) for part, size in sizes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}.{norm}.weight"] = torch.ones(hidden).bfloat16()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def restore(runner: Runner, ids: list[int]) -> None:
    """Restore random keys and values for the tokens, as a prompt cache would its own."""
    draw = torch.Generator().manual_seed(1)
    store = runner.cache.store
    like = store.dump(0, _PIECE)
    piece = torch.randn(like.shape, generator=draw).to(like.dtype)
    whole = len(ids) // store.grain * store.grain
    for start in range(0, whole, _PIECE):
        some = ids[start : min(start + _PIECE, whole)]
        runner.restore(start, some, piece[:, :, : len(some) // store.grain])


def tokenizing(subject: Subject) -> Iterator[Cost]:
    """Encode a text of so many tokens."""
    tokenizer = open_model(EngineConfig()).tokenizer
    text = tokenizer.decode(subject.ids)
    yield "tokenizing", timed(lambda: tokenizer.encode(text, special_tokens=True)), None


def sequence(subject: Subject) -> Iterator[Cost]:
    """Check the tokens of a prompt, compare them with the last one's, and the comparisons of a step."""
    ids = subject.ids
    yield "checking token ids", timed(lambda: token_ids(ids), 3), None
    tokens = TokenSequence(ids)
    yield "a second question: common prefix", timed(lambda: tokens.restart([*ids[:-8], 5, 6, 7]), 3), None
    yield "common prefix of lists", timed(lambda: common_prefix(ids, list(ids)), 3), None
    follower = Subject

    def step() -> None:
        start = len(tokens)
        tokens.extend([1, 2, 3])
        tokens.marks.update(follower, len(tokens))
        tokens.truncate(start)

    yield "a step's token lists", timed(step, 50), None


def rope(subject: Subject) -> Iterator[Cost]:
    """Compute the tables of RoPE, and extend them by a draft beyond the end."""
    tables = subject.model.rope(subject.tokens)
    yield (
        "RoPE tables",
        timed(lambda: subject.model.rope(subject.tokens)),
        sum(x.nbytes for x in tables.rows(0, subject.tokens)),
    )
    yield "RoPE tables, one token more", timed(lambda: tables.rows(subject.tokens, subject.tokens + 1)), None


def retrieval(subject: Subject) -> Iterator[Cost]:
    """Restore, verify, and select chunks: the first time, and again after a few tokens; with threads as in a run."""
    with torch_on_one_thread(subject.model.operations.kernel):
        yield from _retrieval(subject)


def _retrieval(subject: Subject) -> Iterator[Cost]:
    before, started = resident(), time.perf_counter()
    full = subject.full
    yield "restoring keys and values", time.perf_counter() - started, resident() - before
    text = TokenSequence(subject.ids)
    full.cache.keep_queries()
    middle = SelectedRunner(full, selected_cache(full.cache, Speculation(), "retrieval"))

    def verify() -> None:
        full.model.logits(full.rows(text, [7] * (ROWS - 1)))
        full.settle(text)

    verify()
    yield (
        "verification of 8",
        timed(verify, 5),
        full.cache.store.nbytes if hasattr(full.cache.store, "nbytes") else None,
    )
    before = resident()
    first = timed(lambda: middle.rows(text))
    yield "index and first selection", first, resident() - before

    @torch.inference_mode()
    def select() -> None:
        middle.renew()
        middle.cache.begin(1)

    yield "selection", timed(select, 7), None
    text.extend([5] * 64)
    text.commit()
    full.rows(text)

    def select_later() -> None:
        middle.renew()
        middle.rows(text, [3])

    yield "a step with a new selection", timed(select_later, 5), None
    yield "a step on the selection", timed(lambda: middle.rows(text, [4]), 5), None


def prompt_cache(subject: Subject) -> Iterator[Cost]:
    """The chain of a prompt's blocks, and a folder with a file for each."""
    folder = PromptFolder(subject.folder / "prompts")
    storage = Storage(folder, ALONE, "m", "a document", EXACT)
    yield "prompt cache: chain", timed(lambda: Prompt(storage, "f" * 64, subject.ids), 3), None
    prompt = Prompt(storage, "f" * 64, subject.ids)
    folder.make("f" * 64)
    small = torch.zeros(1, 1, 1, 2)
    started = time.perf_counter()
    for index, path in enumerate(prompt.paths):
        parent = prompt.keys[index - 1] if index else ""
        write_block(path, Header(prompt.keys[index], parent, "", "m", "a document", 1.0, 1.0), prompt.ids(index), small)
    yield "prompt cache: writing files", time.perf_counter() - started, len(prompt.paths) * TOKENS * 8
    yield "prompt cache: listing", timed(lambda: list(folder.blocks())), None
    yield "prompt cache: entries", timed(lambda: entries(folder)), None
    yield "prompt cache: what is stored", timed(lambda: prompt.stored(0, len(prompt.paths))), None
    yield "prompt cache: reading small files", timed(lambda: [prompt.read(i) for i in range(len(prompt.paths))]), None


def lookup(subject: Subject) -> Iterator[Cost]:
    """The n-gram index: of the prompt, and of each token after it."""
    drafter, text, before = LookupDrafter(), TokenSequence(subject.ids), resident()
    yield "n-gram index", timed(lambda: drafter.draft_kind(text)), resident() - before

    def step() -> None:
        text.extend([11])
        text.commit()
        drafter.propose(text, 16)

    yield "n-gram index: a token", timed(step, 200), None


def penalties(subject: Subject) -> Iterator[Cost]:
    """DRY and the repetition penalty on one row."""
    sampling = Sampling(repetition_penalty=1.1, dry_multiplier=0.8, no_repeat_ngram=4)
    penalty = Penalties(sampling, 49152, torch.device("cpu"))
    yield "penalties: the prompt", timed(lambda: penalty.observe(subject.ids, generated=False)), None
    logits = torch.randn(1, 49152)
    yield "penalties: a row", timed(lambda: penalty.apply(logits, [()]), 5), None


def pages(subject: Subject) -> Iterator[Cost]:
    """The pages of an offloaded cache: making it, and the bookkeeping of a pass that streams them all."""
    model, link = subject.model, SimulatedLink(bandwidth=1e15)
    factory = TieredStoreFactory(
        model.operations, torch.device("cpu"), TierSettings(mode="stream", resident_layers=0), link
    )
    made: list = []
    yield (
        "pages: making them",
        timed(lambda: made.append(factory.new_store(model.shape, subject.tokens + SPARE, model.dtype))),
        None,
    )
    runner = Runner(model, model.new_cache(subject.tokens + SPARE, store=made.pop()))
    restore(runner, subject.ids[:-1])
    text = TokenSequence(subject.ids)
    runner.rows(text)
    yield "a streamed step, an endless link", timed(lambda: (runner.rows(text, [3]), runner.settle(text)), 3), None


def planning(subject: Subject) -> Iterator[Cost]:
    """The memory estimate of a run, from which plans are made."""
    opened = replace(subject.opened, speculation=Speculation(method="triforce"))
    yield "memory estimate", timed(lambda: opened.estimate(subject.tokens), 5), opened.estimate(subject.tokens).total


def peak(subject: Subject) -> Iterator[Cost]:
    """The most memory that the process has had, without that before the model, and the plan's for the same run.

    For runs of one length whose other parts are retrieval and lookup.
    """
    opened = replace(subject.opened, speculation=Speculation(method="triforce", draft="lookup"))
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - subject.resident
    yield "peak memory", 0.0, used
    yield "planned memory", 0.0, opened.estimate(subject.tokens + SPARE).total


def meter(subject: Subject) -> Iterator[Cost]:
    """The statistics of a prefill in chunks, and of as many tokens as a long answer has."""
    events = [Prefilled(done, subject.tokens) for done in range(0, subject.tokens, 512)]
    events += [Tokens((index,)) for index in range(subject.tokens // 64)]

    def watch() -> None:
        one = Meter(subject.tokens)
        for _ in one.watch(events):
            pass
        one.summary("length")

    yield "statistics", timed(watch), None


PARTS: dict[str, Callable[[Subject], Iterator[Cost]]] = {
    part.__name__: part
    for part in (tokenizing, sequence, rope, retrieval, lookup, penalties, prompt_cache, pages, planning, meter, peak)
}
