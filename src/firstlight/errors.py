"""Owns the exception tree and the exit codes; knows nothing of what raises them.

    FirstlightError               exit code
      CheckFailed                 1   a check ran and did not hold
        DigestMismatch            1   bytes differ from what the store recorded
      UsageError                  2   options contradict each other or make no sense
      BadInput                    3   a file, config, tensor or request is not what it must be
        ConfigError               3   a model config field is unknown, missing or out of range
        TensorError               3   a tensor is missing, extra, of wrong shape or dtype
        StoreError                3   the directory is not a complete store
        LayoutError               3   a layout (TP, PP, EP, DP) cannot work for this model
        RequestError              3   a request cannot be served as asked (HTTP 400)
      EnvironmentProblem          4   the machine lacks something: torch, disk, memory, a port
        OutOfBudget               4   a memory plan does not fit

Messages say what, where and what to do. Anything else that escapes is a bug in firstlight.
"""


class FirstlightError(Exception):
    """Base of everything a user may be shown; `exit_code` is what the command line returns."""

    exit_code = 1


class CheckFailed(FirstlightError):
    """A check ran to its end and did not hold."""

    exit_code = 1


class DigestMismatch(CheckFailed):
    """Stored or loaded bytes differ from their recorded digest."""


class UsageError(FirstlightError):
    """The options given contradict each other or are out of range."""

    exit_code = 2


class BadInput(FirstlightError):
    """A file, config, tensor or request is not what it must be."""

    exit_code = 3


class ConfigError(BadInput):
    """A model config field is unknown, missing, contradictory or out of range."""


class TensorError(BadInput):
    """A tensor is missing, unexpected, or of another shape or dtype than the config says."""


class StoreError(BadInput):
    """The directory is not a complete weight store of a version this program reads."""


class LayoutError(BadInput):
    """The model cannot be cut this way; the message lists the degrees that are legal."""


class RequestError(BadInput):
    """A request cannot be served as asked; `parameter` names the offending field."""

    def __init__(self, message: str, parameter: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.code = code


class EnvironmentProblem(FirstlightError):
    """The machine lacks something this needs: torch, disk, memory, a free port."""

    exit_code = 4


class OutOfBudget(EnvironmentProblem):
    """A memory plan does not fit; the message gives the ways out in numbers."""
