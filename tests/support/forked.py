"""Other processes, forked from a server that has imported everything and run nothing."""

import multiprocessing
import os
import sys
from multiprocessing import forkserver

CONTEXT = multiprocessing.get_context("forkserver")


def start_server():
    """Start the fork server, whose imports are done once, with this process's import path."""
    CONTEXT.set_forkserver_preload(["tests.support.prompt_cache", "tests.parallel.test_methods"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)
