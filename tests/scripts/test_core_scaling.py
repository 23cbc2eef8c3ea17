"""The table of many cores in the documentation is what plans say today."""

from scripts.core_scaling import MACHINES, THREADS, TOKENS, milliseconds
from tests.support.paths import ROOT


def test_the_documented_times_are_those_of_plans():
    text = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    for name, (cores, gb_s) in MACHINES.items():
        used = [threads for threads in THREADS if threads <= cores]
        times = [[f"{milliseconds(cores, gb_s, threads, tokens):.0f}" for tokens in TOKENS] for threads in used]
        assert f"| {name} | {' | '.join(map(' / '.join, times))} |" in text


def test_more_threads_are_never_slower_and_memory_binds_in_the_end():
    cores, gb_s = MACHINES["the same, interleaved over both nodes"]
    found = [milliseconds(cores, gb_s, threads, 8192) for threads in (*THREADS, 128)]
    assert found == sorted(found, reverse=True) and found[-1] == found[-2]
    assert found[0] / found[1] > 3.5
