"""Interrupts at every instruction of some files: what a signal may do to them."""

import sys
from contextlib import contextmanager
from itertools import count


@contextmanager
def interrupted(at, *modules, event="opcode", error=KeyboardInterrupt):
    """Raise an error before instruction (or line) number `at` of the modules; yield a list that has its line.

    Python answers signals between lines, and where something is called; not between the targets of an assignment.
    """
    files, numbers, hit = {module.__file__ for module in modules}, count(), []

    def trace(frame, traced, _):
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = event == "opcode"
        if traced == event and next(numbers) == at:
            hit.append(frame.f_lineno)
            raise error
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield hit
    except error:
        pass
    finally:
        sys.settrace(before)
