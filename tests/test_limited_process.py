"""Limits of memory and time on a child process: Python's own `eval` is what it runs here."""

import signal
import sys
import threading

import psutil
import pytest

from offload.system import limited_process
from offload.system.limited_process import LimitedProcesses, LimitExceeded, Limits
from tests.support.waiting import until

FEW = Limits(memory=64 * 2**20, seconds=0.1)
ENOUGH = Limits(FEW.memory, seconds=60)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems limit less")


@pytest.fixture
def processes(monkeypatch):
    """Processes of which a busy machine gives one as little as it likes."""
    monkeypatch.setattr(limited_process, "_PATIENCE", 600)
    made = LimitedProcesses("builtins:eval")
    yield made
    made.close_idle()


def children():
    return {each.pid for each in psutil.Process().children(recursive=True)}


def test_one_process_answers_many_calls(processes):
    pids = {pid_of_one(processes) for _ in range(3)}
    assert pids <= children() and len(pids) == 1
    processes.close_idle()
    assert not pids & children()


def pid_of_one(processes):
    return int(processes.call(b"str(__import__('os').getpid()).encode()", ENOUGH))


def test_what_a_process_does_between_calls_does_not_count(processes):
    """It looks whether its parent lives: after days, the rest of the seconds of its last call would be used up."""
    process, work = psutil.Process(pid_of_one(processes)), b"all(True for _ in range(10**7))"
    enough = sum(process.cpu_times()[:2]) + 2 * FEW.seconds
    processes.call(b"__import__('threading').Thread(target=lambda: %b).start() or b''" % work, FEW)
    until(lambda: has_ended(process) or sum(process.cpu_times()[:2]) > enough)
    assert pid_of_one(processes) == process.pid


def has_ended(process):
    return process.status() == psutil.STATUS_ZOMBIE


def test_a_process_that_was_killed_between_calls_is_replaced(processes):
    """By a system that is short of memory."""
    process = psutil.Process(pid_of_one(processes))
    process.kill()
    until(lambda: has_ended(process))
    assert pid_of_one(processes) != process.pid and process.pid not in children()


def test_what_is_printed_does_not_disturb(processes):
    assert processes.call(b"print('noise') or b'answer'", ENOUGH) == b"answer"
    assert processes.call(b"__import__('sys').stdin.read().encode()", ENOUGH) == b""


@pytest.mark.parametrize(
    ("work", "limits", "reason"),
    [
        (b"bytes(10**9)", ENOUGH, "takes more than 64.0 MiB of memory"),
        (b"sum(iter(int, 1))", FEW, "takes more than 0.1 s of processor time"),
        (b"__import__('time').sleep(100)", FEW, "takes more than 0.1 s of processor time"),
        (b"__import__('os').kill(__import__('os').getpid(), 11)", ENOUGH, "ends with SIGSEGV"),
        (b"__import__('os')._exit(3)", ENOUGH, "ends with code 3"),
    ],
)
def test_what_exceeds_its_limits_ends(processes, monkeypatch, work, limits, reason):
    if b"sleep" in work:
        monkeypatch.setattr(limited_process, "_PATIENCE", 1)
    before = children()
    with pytest.raises(LimitExceeded) as caught:
        processes.call(work, limits)
    assert reason in str(caught.value).replace("makes its process end", "ends")
    assert not children() - before  # neither running nor a zombie
    assert processes.call(b"b'the next one works'", ENOUGH) == b"the next one works"


def test_ctrl_c_ends_the_process(processes, interruptible):
    before, main = children(), threading.main_thread().ident

    def interrupt():
        until(lambda: sys._current_frames()[main].f_code is limited_process._read.__code__)  # the call waits
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        processes.call(b"__import__('time').sleep(1000)", ENOUGH)
    assert not children() - before


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
    thread.join(60)
    assert len(failures) == 1 and not children() - before
    with pytest.raises(LimitExceeded, match="no longer wanted"):
        processes.call(b"b''", FEW)
