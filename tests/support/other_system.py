"""Runs commands in one process from which the modules, calls, signals and files that only POSIX systems have are taken.

    python tests/support/other_system.py '[["generate", "Hi"], ["cache"]]' report.json

What an import of torch or another library needs is loaded before: each has code of its own for every system, and
chooses it by `sys.platform`, which stays that of this machine.
"""

import io
import json
import os
import signal
import sys
from pathlib import Path

import filelock  # noqa: F401
import platformdirs.unix  # noqa: F401
import psutil  # noqa: F401

MODULES = ("fcntl", "termios", "tty", "pty", "resource", "pwd", "grp")
CALLS = (
    *("fork", "forkpty", "geteuid", "killpg", "mkfifo", "posix_fadvise", "posix_fallocate", "pread", "preadv"),
    *("pwrite", "pwritev", "sched_getaffinity", "sched_setaffinity", "set_blocking", "get_blocking"),
)
SIGNALS = ("SIGHUP", "SIGPIPE", "SIGQUIT", "SIGALRM", "SIGCHLD", "SIGTSTP", "SIGCONT", "SIGUSR1", "SIGWINCH", "SIGKILL")


class Missing:
    """Finds no module of POSIX: the first of the finders of imports."""

    def find_spec(self, name, path=None, target=None):
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def refuse_system_files(event, args):
    """Refuse files of Linux to all but psutil, which asks other systems by their own calls."""
    if event != "open" or not str(args[0]).startswith(("/proc", "/sys/")):
        return
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("psutil"):
            return
        frame = frame.f_back
    raise FileNotFoundError(2, "No such file or directory", args[0])


def take_away():
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, Missing())
    for module, names in ((os, CALLS), (signal, SIGNALS)):
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    sys.addaudithook(refuse_system_files)


if __name__ == "__main__":
    take_away()
    sys.path.insert(0, os.getcwd())
    from triforce_cli.app import run, settle_libraries
    from triforce_cli.signals import listen

    listen()
    settle_libraries()
    results = []
    for command in json.loads(sys.argv[1]):
        outputs = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
        sys.stdin = io.TextIOWrapper(io.BytesIO(b"What is it?\n" if command[0] == "chat" else b""))
        sys.stdout, sys.stderr = outputs
        code = run(command)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        outputs[0].flush()
        results.append([code, outputs[0].buffer.getvalue().decode(), outputs[1].getvalue()])
    Path(sys.argv[2]).write_text(json.dumps(results), "utf-8")
