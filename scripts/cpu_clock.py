"""With `--cpu-time` on the command line, time is what the main thread computes, and what others sleep while it waits.

    python scripts/cpu_clock.py --cpu-time bench -f book.txt --batch 1,4    # a command of triforce by this clock

For machines whose cores are shared. Import this before `offload`: its clocks, those that `auto` decides by too, then
stand still while the hypervisor or another process has the core. Nobody sleeps in fact: a simulated link takes the time
on this clock that it should, but none of yours. What is computed by other threads is not counted.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

OPTION = "--cpu-time"
IN_USE = OPTION in sys.argv
_SAMPLES, _INTERVAL_S = 3, 2e-4


class CpuClock:
    """The CPU time of the main thread, and the sleeps that have been skipped."""

    def __init__(self) -> None:
        self._sleep = time.sleep
        self._main = threading.main_thread()
        self._clock = time.pthread_getcpuclockid(self._main.ident)
        self._state = Path(f"/proc/self/task/{self._main.native_id}/stat")
        self._skipped_s = 0.0

    def now(self) -> float:
        return time.clock_gettime(self._clock) + self._skipped_s

    def sleep(self, seconds: float) -> None:
        """Return when the clock shows so many seconds more: it is put forward if the main thread waits."""
        end = self.now() + seconds
        while self.now() < end:
            if threading.current_thread() is self._main or self._main_waits():
                self._skipped_s += max(end - self.now(), 0)

    def _main_waits(self) -> bool:
        """Return whether the main thread has waited for as long as it takes to find out."""
        before = time.clock_gettime(self._clock)
        for _ in range(_SAMPLES):
            self._sleep(_INTERVAL_S)
            if self._state.read_text("ascii").rpartition(")")[2].split()[0] != "S":
                return False
        return time.clock_gettime(self._clock) == before


if IN_USE:
    assert "offload" not in sys.modules, "import cpu_clock before offload, which keeps the clock that it finds"
    os.environ["OMP_NUM_THREADS"] = "1"
    clock = CpuClock()
    time.perf_counter, time.sleep = clock.now, clock.sleep

if __name__ == "__main__":
    from triforce_cli.app import run

    sys.exit(run([each for each in sys.argv[1:] if each != OPTION]))
