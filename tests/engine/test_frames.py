"""A verification is close to its work: few calls lie between `Engine.generate` and the native kernel."""

import sys

import pytest

from offload import EngineConfig, Speculation, open_model
from offload.engine import Engine
from offload.speculation.levels.level import Level
from tests.support.engine import run
from tests.support.models import ids, make_hf_model, make_tokenizer

MOST = 16
PROMPT = [*[1, 2, 3, 4] * 10, *ids(10), 1, 2, 3]


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Engine:
    path = tmp_path_factory.mktemp("model")
    make_hf_model("llama", intermediate_size=256).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    config = EngineConfig(model=str(path), device="cpu", dtype="bfloat16")
    return open_model(config, speculation=Speculation("lookup")).load().without_end()


@pytest.mark.parametrize(("method", "tree"), [("ar", "chain"), ("lookup", "chain"), ("lookup", "k-ary:2x2")])
def test_few_frames_lie_between_the_engine_and_the_kernel(engine, native_operations, method, tree):
    deepest: list[str] = []

    def profile(frame, event, _):
        nonlocal deepest
        above = frame.f_back
        if event != "call" or not _is_kernel(frame.f_code) or above is None or _is_kernel(above.f_code):
            return
        codes = [frame.f_code]
        while above is not None and codes[-1] is not Engine.generate.__code__:
            codes.append(above.f_code)
            above = above.f_back
        if codes[-1] is Engine.generate.__code__ and Level.advance.__code__ in codes:
            deepest = max(deepest, [f"{code.co_filename}:{code.co_name}" for code in reversed(codes)], key=len)

    sys.setprofile(profile)
    try:
        run(engine, PROMPT, 12, method, tree=tree)
    finally:
        sys.setprofile(None)
    assert 0 < len(deepest) <= MOST, "\n".join(deepest)


def _is_kernel(code) -> bool:
    return "kernels/native" in code.co_filename.replace("\\", "/")
