"""The process in which another program generates, for `bench --peers`: it reads requests and answers in JSON lines.

It computes as the ladder does: a prompt, then token by token, past the end of sequence. Imports what it runs alone.
"""

import ctypes
import gc
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from offload.events import Tokens
from offload.metrics import Meter

from ..run.processor import OtherLoad, peak_memory

Emit = Callable[[int], None]


class Transformers:
    """generate() of transformers, with its own cache of all keys and values, and sdpa attention."""

    def __init__(self, path: str, device: str, dtype: str, threads: int, longest: int) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        torch.set_num_threads(threads)
        self.device = torch.device(device)
        from offload.loading.hub.download import open_checkpoint

        checkpoint, kind = open_checkpoint(Path(path)), getattr(torch, dtype)
        if checkpoint.is_quantized:
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=kind)
            _copy_weights(model, checkpoint)  # as they are after rounding
        else:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=kind)
        self._model = model.to(self.device).eval()
        self._model.generation_config = GenerationConfig()  # no end of sequence, and no sampling of its own
        self.generate(list(range(8)), 4, {"temperature": 0.0}, 0, lambda _: None)  # loads what is loaded lazily

    def generate(self, ids: Sequence[int], new: int, sampling: Mapping[str, Any], seed: int, emit: Emit) -> None:
        import torch
        from transformers import GenerationConfig

        chosen: dict[str, Any] = {"do_sample": sampling["temperature"] > 0}
        if chosen["do_sample"]:
            chosen |= {"temperature": sampling["temperature"], "top_p": sampling["top_p"], "top_k": sampling["top_k"]}
            chosen |= {"min_p": sampling["min_p"] or None}
        torch.manual_seed(seed)
        prompt = torch.tensor([ids], device=self.device)
        with torch.inference_mode():
            self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=GenerationConfig(max_new_tokens=new, pad_token_id=0, **chosen),
                streamer=_Streamer(emit),
            )


class _Streamer:
    """Passes on what `generate` puts, but for the prompt, which is first."""

    def __init__(self, emit: Emit) -> None:
        self._emit, self._has_prompt = emit, False

    def put(self, value: Any) -> None:
        if self._has_prompt:
            self._emit(int(value.item()))
        self._has_prompt = True

    def end(self) -> None:
        """Do nothing: the caller knows how many tokens there are."""


def _copy_weights(model: Any, checkpoint: Any) -> None:
    """Copy a checkpoint's tensors into a model of transformers. Raises ValueError if they are not all of its own."""
    import torch

    own = dict(model.named_parameters())  # tied ones once
    with checkpoint.tensors() as read, torch.no_grad():
        for name in checkpoint.sizes():
            if name in own:
                own.pop(name).copy_(read(name))
    if own:
        raise ValueError(f"transformers has other names for the weights: {', '.join(list(own)[:3])}")


class LlamaCpp:
    """llama.cpp by llama-cpp-python on a GGUF file, with flash attention; all layers on a GPU where there is one."""

    device = None  # whose memory is not known: keys and values are allocated with the model, for the longest length

    def __init__(self, path: str, device: str, dtype: str, threads: int, longest: int) -> None:
        from llama_cpp import Llama

        layers = 0 if device == "cpu" else -1
        more = {"n_threads": threads, "n_threads_batch": threads, "flash_attn": True, "n_gpu_layers": layers}
        self._llama = Llama(path, n_ctx=longest + 8, logits_all=False, verbose=False, **more)

    def generate(self, ids: Sequence[int], new: int, sampling: Mapping[str, Any], seed: int, emit: Emit) -> None:
        chosen = {"temp": sampling["temperature"], "top_p": sampling["top_p"], "top_k": sampling["top_k"]}
        chosen |= {"min_p": sampling["min_p"], "typical_p": 1.0, "repeat_penalty": 1.0}
        self._llama.set_seed(seed)
        self._llama.reset()
        self._llama.eval(list(ids))
        for number in range(new):
            token = int(self._llama.sample(**chosen))
            emit(token)
            if number + 1 < new:
                self._llama.eval([token])


PROGRAMS: dict[str, Any] = {"transformers": Transformers, "llama.cpp": LlamaCpp}


def run(program: Any, ids: list[int], new: int, sampling: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Generate once; return the tokens, the times, and the bytes by which memory rose above `program.resident`."""
    can_measure, load, meter = _restart_peak(program.device), OtherLoad(), Meter(len(ids))
    program.generate(ids, new, sampling, seed, lambda token: meter.observe(Tokens((token,))))
    rise = max(peak_memory(program.device) - program.resident, 0) if can_measure else None
    names = ("ttft_s", "tokens_per_s", "tbt_median_s", "tbt_p95_s", "total_s")
    summary = meter.summary("length")
    measured = {name: getattr(summary, name) for name in names}
    return {"measured": measured | {"memory_bytes": rise, "other_load_cores": load.cores()}, "tokens": meter.ids}


def _restart_peak(device: Any) -> bool:
    """Forget the most memory that was held; return whether that can be done."""
    if device is None:
        return False
    if device.type == "cuda":
        from torch import cuda

        cuda.reset_peak_memory_stats(device)
        return True
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # what was freed would be taken first, and not be seen
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):  # not Linux with glibc
        return False
    return True


def main() -> None:
    """Load the program that the first line names, and answer one line for each further one until the input ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    name, *load = json.loads(sys.stdin.readline())
    program: Any = None

    def loaded() -> dict[str, Any]:
        nonlocal program
        program = PROGRAMS[name](*load)
        program.resident = peak_memory(program.device) if _restart_peak(program.device) else 0
        return {}

    _answer(out, loaded)  # or the parent ends this process
    for line in sys.stdin:
        _answer(out, partial(run, program, *json.loads(line)))


def _answer(out: Any, action: Callable[[], dict[str, Any]]) -> None:
    try:
        found = action()
    except Exception as error:  # of another program: any
        found = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    print(json.dumps(found), file=out, flush=True)
