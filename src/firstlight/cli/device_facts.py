"""Owns what a start asks of a device before anything is loaded: a process that ends with its
answer asks, so that neither torch nor a vendor's driver enters the one that serves HTTP.

Refuses to know model, plan and cache; the processor is asked at once, for that needs no torch.
"""

from __future__ import annotations

import subprocess
import sys

import msgspec

from firstlight.errors import EnvironmentProblem, FirstlightError, UsageError
from firstlight.runner.memory import first_device

# A driver that hangs is no reason to wait for ever; a busy machine imports torch in half a minute.
PATIENCE_SECONDS = 120.0
_REFUSALS = {kind.exit_code: kind for kind in (UsageError, EnvironmentProblem)}


class DeviceFacts(msgspec.Struct, frozen=True, tag=True):
    """The platform's name, what each rank may take of its device, and whether the device has memory
    that is an engine's alone."""

    name: str
    available_bytes: int
    owned: bool


class _Refused(msgspec.Struct, frozen=True, tag=True):
    message: str
    exit_code: int


def device_facts(asked: str, ranks: int, dtype: str, kv_dtype: str = "auto") -> DeviceFacts:
    """Returns what the device of the first of so many ranks has.

    Raises UsageError for an unknown platform, EnvironmentProblem for one that cannot be used here
    or does not compute in this type, or cannot hold such caches.
    """
    if asked == "cpu":
        return _asked_here(asked, ranks, dtype, kv_dtype)
    answer = _answer([asked, str(ranks), dtype, kv_dtype])
    if isinstance(answer, _Refused):
        raise _REFUSALS.get(answer.exit_code, EnvironmentProblem)(answer.message)
    return answer


def _answer(words: list[str]) -> DeviceFacts | _Refused:
    """Lets a process of its own ask; libraries may print before its one line of JSON."""
    command = [sys.executable, "-m", "firstlight.cli.device_facts", *words]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        line = done.stdout.strip().rpartition("\n")[2]
        return msgspec.json.decode(line, type=DeviceFacts | _Refused)
    except subprocess.TimeoutExpired:
        found = f"did not answer within {PATIENCE_SECONDS:.0f} s"
    except msgspec.DecodeError:
        said = done.stderr.strip().rpartition("\n")[2]
        found = f"ended the process that asked with code {done.returncode}: {said or 'no word'}"
    raise EnvironmentProblem(
        f"platform {words[0]}: the device {found}; check its driver with firstlight probe"
    )


def _asked_here(asked: str, ranks: int, dtype: str, kv_dtype: str) -> DeviceFacts:
    device = first_device(asked, ranks)
    device.require_fit(dtype, kv_dtype)
    return DeviceFacts(device.platform.name, device.available_bytes(), device.owned)


def main() -> int:
    """Asks for the device that the arguments name and prints the answer as JSON."""
    asked, ranks, dtype, kv_dtype = sys.argv[1:]
    answer: DeviceFacts | _Refused
    try:
        answer = _asked_here(asked, int(ranks), dtype, kv_dtype)
    except FirstlightError as error:
        answer = _Refused(str(error), error.exit_code)
    print(f"\n{msgspec.json.encode(answer).decode()}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
