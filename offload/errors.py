"""Everything a user can get wrong, as typed errors with a hint. Knows nothing of terminals or exit codes."""


class TriforceError(Exception):
    """Report what failed while running.

    `message` is one sentence with the numbers in it; `hint` says what to do next.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(TriforceError):
    """Report a request that is wrong itself: it would fail on any machine."""


class PromptError(UsageError):
    """Report a prompt that is missing, empty, no text or longer than the context; the message has the tokens."""


class SettingsError(UsageError):
    """Report a setting, a profile or a combination of settings that makes no sense, or has the wrong type."""


class ModelNotFound(UsageError):
    """Report that there is no model at the given path, name or hub id."""


class UnsupportedModel(UsageError):
    """Report a model that is real but of a kind that this program does not run."""


class CheckpointError(TriforceError):
    """Report that the model's files are corrupt, truncated or incomplete."""


class FetchError(TriforceError):
    """Report that a model could not be fetched over the network."""


class OutOfMemory(TriforceError):
    """Report that the model and its KV cache do not fit the memory that is there; the message has the bytes."""


class OutOfDisk(TriforceError):
    """There is no room on the disk for the KV cache."""


class RankLost(TriforceError):
    """Another rank of the group has ended, so that nothing can be computed any more."""


class RankMissing(TriforceError):
    """Not all ranks have joined the group in time."""


class UnusableMeasurement(TriforceError):
    """The file of what was measured on this machine is unreadable or corrupt; everything works without it."""


class InternalError(TriforceError):
    """An exception that is none of ours, which is its `__cause__`: a defect of this program, or of the system."""


def typed_error(error: Exception) -> TriforceError:
    """Return an exception as one of ours: itself, OutOfMemory, or InternalError."""
    if isinstance(error, TriforceError):
        return error
    typed: TriforceError
    message = (str(error).strip().splitlines() or ["(no message)"])[0]
    if isinstance(error, MemoryError) or ("alloc" in str(error).lower() and "memory" in str(error).lower()):
        hint = "use a shorter prompt, --kv packed, which loses nothing, or a smaller model"
        typed = OutOfMemory(f"out of memory: {message}", hint)
    elif isinstance(error, OSError) and error.errno is not None:
        where = f" ({error.filename})" if error.filename else ""
        hint = "check the free disk space, the permissions and the output path"
        typed = InternalError(f"{error.strerror}{where}", hint)
    else:
        hint = "this is a bug in triforce; TRIFORCE_DEBUG=1 shows where"
        typed = InternalError(f"{type(error).__name__}: {message}", hint)
    typed.__cause__ = error
    return typed


class Degraded(UserWarning):
    """Something works, but not as well as it could; given to `warnings.warn`. Nothing is wrong with the output."""
