"""Limits of memory and time on a child process: Python's own `eval` is what it runs here."""

import signal
import sys
import threading
import time

import psutil
import pytest

from offload.system.limited_process import LimitedProcesses, LimitExceeded, Limits
from tests.support.waiting import until

FEW = Limits(memory=64 * 2**20, seconds=0.1)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems limit less")


@pytest.fixture
def processes():
    made = LimitedProcesses("builtins:eval")
    yield made
    made.close_idle()


def children():
    return {each.pid for each in psutil.Process().children(recursive=True)}


def test_one_process_answers_many_calls(processes):
    pids = {processes.call(b"str(__import__('os').getpid()).encode()", FEW) for _ in range(3)}
    assert {int(pid) for pid in pids} <= children() and len(pids) == 1
    processes.close_idle()
    assert not {int(pid) for pid in pids} & children()


def test_what_is_printed_does_not_disturb(processes):
    assert processes.call(b"print('noise') or b'answer'", FEW) == b"answer"
    assert processes.call(b"__import__('sys').stdin.read().encode()", FEW) == b""


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        (b"bytes(10**9)", "takes more than 64.0 MiB of memory"),
        (b"sum(iter(int, 1))", "takes more than 0.1 s of processor time"),
        (b"__import__('time').sleep(100)", "takes more than 0.1 s of processor time"),
        (b"__import__('os').kill(__import__('os').getpid(), 11)", "ends with SIGSEGV"),
        (b"__import__('os')._exit(3)", "ends with code 3"),
    ],
)
def test_what_exceeds_its_limits_ends(processes, work, reason):
    before = children()
    with pytest.raises(LimitExceeded) as caught:
        processes.call(work, FEW)
    assert reason in str(caught.value).replace("makes its process end", "ends")
    assert not children() - before  # neither running nor a zombie
    assert processes.call(b"b'the next one works'", FEW) == b"the next one works"


def test_ctrl_c_ends_the_process(processes, interruptible):
    before, started = children(), time.perf_counter()

    def interrupt():
        until(lambda: children() - before)
        time.sleep(0.02)  # the call waits
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        processes.call(b"__import__('time').sleep(100)", Limits(FEW.memory, 10))
    assert not children() - before
    assert time.perf_counter() - started < 50


def test_ending_all_ends_a_call_under_way_and_refuses_later_ones():
    processes, before, failures = LimitedProcesses("builtins:eval"), children(), []

    def call():
        try:
            processes.call(b"__import__('time').sleep(100)", Limits(memory=2**26, seconds=100))
        except LimitExceeded as error:
            failures.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    until(lambda: children() - before or not thread.is_alive())
    processes.end()
    thread.join(30)
    assert len(failures) == 1 and not children() - before
    with pytest.raises(LimitExceeded, match="no longer wanted"):
        processes.call(b"b''", FEW)
