"""What whole runs emit: every method at temperature 0 and by distribution, batches, restored prompts, families."""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path

import torch
from gpu_bare import is_missing
from gpu_machine import Machine
from gpu_models import llama, random_model
from gpu_parts import MOST_MARGIN, verdict
from gpu_rows import Rows, Skipped
from torch import Tensor

from offload.engine import Engine
from offload.events import Tokens
from offload.kernels.ops import TorchOperations
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.weights import load_model
from offload.memory.factory import TieredStoreFactory
from offload.memory.tier_settings import TierSettings
from offload.model.decoder import Model
from offload.settings.config import GenerationConfig, Sampling, Speculation

ROOT = Path(__file__).parents[1]
GREEDY = Sampling(temperature=0)
SAMPLED = Sampling(temperature=0.1, top_p=1)  # random weights have logits of .16: divided by it, of 1.6
METHODS = (("ar", "chain"), ("retrieval", "chain"), ("triforce", "chain"), ("auto", "chain"))
LEAST_P = 1e-4  # of a chi-square test: a right distribution fails once in ten thousand such checks


def generate(engine: Engine, ids: list[int], new: int, method: str, tree: str, sampling: Sampling, seed: int) -> list:
    """Return the tokens of an answer."""
    settings = Speculation(method, draft="lookup", budget=256, tree=tree)
    events = engine.generate(ids, sampling, GenerationConfig(max_new_tokens=new, seed=seed), settings)
    return [token for event in events if isinstance(event, Tokens) for token in event.ids]


def resident(machine: Machine, rows: Rows) -> dict:
    """Run prompt and answer of a 7B and an 8B model's shape with everything on the device, at 128K where it fits."""
    found = {}
    models = {"7B": (32, 4096, 32, 11008, 32000, 32), "8B": (32, 4096, 32, 14336, 128256, 8)}
    for name, (layers, hidden, heads, width, vocab, kv_heads) in models.items():
        shape = llama(layers, hidden, heads, width, vocab, 132000, kv_heads)
        if machine.small:
            shape = llama(2, 64, 4, 128, 512, 8192, min(kv_heads, 4) if name == "7B" else 2)
        tokens = _longest(machine, shape, 1500 if machine.small else 131072)
        if not tokens:
            rows.add(name, "skipped", "does not fit this device")
            continue
        model = random_model(shape, machine.dtype, machine.device)
        engine = Engine(model, (), 256 if machine.small else 2048)
        ids = torch.randint(0, shape.vocab, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
        plain = None
        for method, tree in METHODS:
            emitted = generate(engine, ids, 8 if machine.small else 48, method, tree, GREEDY, 0)
            plain = plain or emitted
            told = (
                "plain"
                if plain is emitted
                else verdict(model, ids, plain, emitted, MOST_MARGIN[machine.dtype.itemsize])
            )
            rows.add(f"{name}, {tokens:,} tokens, {method}, {tree}", f"{len(emitted)} tokens", told)
        found[name] = tokens
        del model, engine
        machine.clear()
    return {"tokens": found}


def _longest(machine: Machine, shape: object, most: int) -> int:
    """Return how many tokens fit the device with the weights, of so many, half and a quarter; 0 for none of them."""
    if machine.small:
        return most
    for tokens in (most, most // 2, most // 4):
        need = shape.parameters * 2 + 1.15 * shape.kv_bytes(tokens, 2) + 6 * 2**30
        if need < torch.cuda.mem_get_info(machine.device)[0]:
            return tokens
    return 0


def distribution(machine: Machine, rows: Rows) -> dict:
    """Compare two sampled tokens of many answers with their exact distribution, for every method; another one fails."""
    torch.manual_seed(0)
    shape = llama(2, 64, 2, 128, 8, 2048)
    model = random_model(shape, machine.dtype, machine.device)
    engine, runs = Engine(model, (), 256), 60 if machine.small else 400
    ids = torch.randint(0, shape.vocab, (600,), generator=torch.Generator().manual_seed(1)).tolist()
    chances = _joint(model, ids).cpu()
    for method, tree in METHODS:
        counts = torch.zeros_like(chances)
        for seed in range(runs):
            first, second, *_ = generate(engine, ids, 4, method, tree, SAMPLED, seed)
            counts[first, second] += 1
        p = min(chi_square(counts.sum(axis), chances.sum(axis)) for axis in (0, 1))
        if runs >= 5 * chances.numel():
            p = min(p, chi_square(counts.flatten(), chances.flatten()))
        rows.add(f"{method}, {tree}", f"p = {p:.2g}", f"{runs} answers")
        if p < LEAST_P:
            raise RuntimeError(f"{method}, {tree}: tokens are not distributed as the target's, p = {p:.1e}")
    return {"runs": runs}


@torch.inference_mode()
def _joint(model: Model, ids: list[int]) -> Tensor:
    """Return the probabilities of each pair of first tokens, `[first, second]` in fp64."""
    vocab = model.shape.vocab
    prompt = torch.tensor(ids, device=model.device)

    def following(*more: int) -> Tensor:
        every = torch.cat((prompt, torch.tensor(more, dtype=torch.long, device=model.device)))
        hidden = model.forward(every, model.new_cache(len(every)))
        return (model.logits(hidden[-1:])[0].double() / SAMPLED.temperature).softmax(0)

    first = following()
    return torch.stack([first[token] * following(token) for token in range(vocab)])


def chi_square(counts: Tensor, chances: Tensor) -> float:
    """Return the p-value of counts; cells of fewer than 5 expected ones are one."""
    expected = chances * counts.sum()
    rare = expected < 5
    counts, expected = (torch.cat((x[~rare], x[rare].sum(0, keepdim=True))) for x in (counts, expected))
    kept = expected > 0
    statistic = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    return float(torch.special.gammaincc((kept.sum().double() - 1) / 2, statistic / 2))


def batches(machine: Machine, rows: Rows) -> dict:
    """Compare two requests of a batch with the same ones alone."""
    if is_missing("greenlet"):
        raise Skipped("there is no greenlet: batches do not run")
    from offload.batching.request import BatchRequest

    model = random_model(llama(2, 64, 2, 128, 512, 8192), machine.dtype, machine.device)
    engine, new = Engine(model, (), 256), 12
    prompts = [list(range(1 + shift, 300 + shift)) for shift in (0, 7)]
    config = GenerationConfig(max_new_tokens=new)
    requests = [BatchRequest(key, ids, GREEDY, config, Speculation("lookup")) for key, ids in enumerate(prompts)]
    found: dict[int, list[int]] = {0: [], 1: []}
    for key, event in engine.generate_batch(requests, 2):
        found[key] += event.ids if isinstance(event, Tokens) else ()
    for key, ids in enumerate(prompts):
        alone = generate(engine, ids, new, "ar", "chain", GREEDY, 0)
        rows.add(f"request {key}", verdict(model, ids, alone, found[key], MOST_MARGIN[machine.dtype.itemsize]))
    return {"tokens": new}


def restored(machine: Machine, rows: Rows) -> dict:
    """Compare answers over keys and values that were saved and restored with those that were computed."""
    model = random_model(llama(2, 64, 2, 128, 512, 8192), machine.dtype, machine.device)
    tiers = TierSettings("stream", page_tokens=512)
    stores = TieredStoreFactory(model.operations, machine.device, tiers, machine.link())
    ids = torch.arange(1, 1601, device=machine.device) % 512
    for name, new in {
        "on the device": lambda: model.new_cache(1700),
        "streamed": lambda: model.new_cache(1700, store=stores.new_store(model.shape, 1700, model.dtype)),
    }.items():
        first, second = new(), new()
        with torch.inference_mode():
            model.forward(ids, first)
            kept = first.store.dump(0, 1600)
            second.restore(1600, kept)
            steps = [model.logits(model.forward(ids[:4], cache)).float() for cache in (first, second)]
        error = ((steps[0] - steps[1]).norm() / steps[0].norm()).item()
        rows.agree(f"restored, {name}", error, 1e-6 if machine.small else 1e-2)
    return {}


def families(machine: Machine, rows: Rows) -> dict:
    """Compare logits of a small model of each family with those of the CPU, both in fp32; wrong ones fail."""
    sys.path.insert(0, str(ROOT))
    try:
        support = importlib.import_module("tests.support.models")
    except ImportError as error:
        raise Skipped(f"the tests' models cannot be made: {error}") from error
    ids, checked = torch.arange(2, 152) % 260, 0
    cases = support.FAMILY_CASES | support.VARIANTS
    for name, (family, changes) in list(cases.items())[:: 6 if machine.small else 1]:
        with tempfile.TemporaryDirectory() as folder:
            support.make_hf_model(family, **changes).save_pretrained(folder)
            logits = []
            for device in (torch.device("cpu"), machine.device):
                model = load_model(
                    FolderCheckpoint(Path(folder)), torch.float32, device, lambda done, total: None, TorchOperations()
                )
                cache = model.new_cache(200)
                with torch.inference_mode():
                    parts = [model.logits(model.forward(part.to(device), cache)) for part in ids.split(67)]
                logits.append(torch.cat(parts).cpu().double())
        error = ((logits[0] - logits[1]).norm() / logits[0].norm()).item()
        rows.agree(name, error, 1e-3)
        checked += 1
    return {"checked": checked}
