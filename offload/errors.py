"""Everything a user can get wrong, as typed errors with a hint. Knows nothing of terminals or exit codes."""


class TriforceError(Exception):
    """Something failed while running.

    `message` is one sentence with the numbers in it; `hint` says what to do next.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(TriforceError):
    """The request itself is wrong: it would fail on any machine."""


class PromptError(UsageError):
    """The prompt is missing, empty, binary or longer than the model's context."""


class SettingsError(UsageError):
    """A setting, a profile or a combination of settings makes no sense."""


class ModelNotFound(UsageError):
    """There is no model at the given path, name or hub id."""


class UnsupportedModel(UsageError):
    """The model is real but of a kind that this program does not run."""


class CheckpointError(TriforceError):
    """The model's files are corrupt, truncated or incomplete."""


class FetchError(TriforceError):
    """A model could not be fetched over the network."""


class OutOfMemory(TriforceError):
    """The model and its KV cache do not fit the memory that is there."""


class OutOfDisk(TriforceError):
    """There is no room on the disk for the KV cache."""


class RankLost(TriforceError):
    """Another rank of the group has ended, so that nothing can be computed any more."""


class RankMissing(TriforceError):
    """Not all ranks have joined the group in time."""


class UnusableMeasurement(TriforceError):
    """The file of what was measured on this machine is unreadable or corrupt; everything works without it."""


class Degraded(UserWarning):
    """Something works, but not as well as it could; given to `warnings.warn`. Nothing is wrong with the output."""
