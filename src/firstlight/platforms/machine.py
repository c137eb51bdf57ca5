"""Owns the one way facts of a machine are read: live, from a record of one, or while recording one.

Refuses to judge. What cannot be found out raises FactUnknown, so that no check can pass on it; what
was looked for and is not there is None.
"""

from __future__ import annotations

import grp
import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from firstlight.errors import BadInput

Fact = TypeVar("Fact")
_COMMAND_SECONDS = 20.0
_ASK_SECONDS = 120.0
_KINDS = ("files", "folders", "variables", "distributions", "commands", "answers")


class FactUnknown(Exception):
    """A fact could not be found out; the message says why."""


class Machine(Protocol):
    """Where facts come from. Every method raises FactUnknown when it cannot tell."""

    def text(self, path: str) -> str | None:
        """The content of a file, None when there is none."""
        ...

    def names(self, folder: str) -> tuple[str, ...] | None:
        """The names in a folder in order, None when there is no such folder."""
        ...

    def variable(self, name: str) -> str | None:
        """An environment variable, None when it is not set."""
        ...

    def distribution(self, name: str) -> str | None:
        """The version of an installed Python package, None when it is not installed."""
        ...

    def command(self, *words: str) -> str | None:
        """What a command prints, None when there is no such command."""
        ...

    def ask(self, subject: str) -> Mapping[str, Any]:
        """The answer to a question that needs code to run: `host`, `room PATH`, `open PATH`, and
        those of the asker, which run in a process of their own.
        """
        ...


class LiveMachine:
    """This machine. `asker` is the module that answers other questions, one line of JSON each."""

    def __init__(self, asker: str = "", seconds: float = _ASK_SECONDS) -> None:
        self._asker = asker
        self._seconds = seconds

    def text(self, path: str) -> str | None:
        """Reads a file; FactUnknown when it is there and may not be read."""
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise FactUnknown(f"{path}: {error.strerror}") from error

    def names(self, folder: str) -> tuple[str, ...] | None:
        """Lists a folder; FactUnknown when it is there and may not be listed."""
        try:
            return tuple(sorted(os.listdir(folder)))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise FactUnknown(f"{folder}: {error.strerror}") from error

    def variable(self, name: str) -> str | None:
        """Reads the environment."""
        return os.environ.get(name)

    def distribution(self, name: str) -> str | None:
        """Asks the metadata of installed packages; imports nothing."""
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    def command(self, *words: str) -> str | None:
        """Runs a command for at most 20 s; FactUnknown when it fails."""
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=_COMMAND_SECONDS)
        except FileNotFoundError:
            return None
        except (OSError, subprocess.TimeoutExpired) as error:
            raise FactUnknown(f"{' '.join(words)}: {error}") from error
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines()
            raise FactUnknown(f"{' '.join(words)} failed: {said[-1] if said else done.returncode}")
        return done.stdout

    def ask(self, subject: str) -> Mapping[str, Any]:
        """Answers in this process what needs no foreign code, the rest in one that may crash."""
        topic, _, argument = subject.partition(" ")
        if topic in _OWN:
            return _OWN[topic](argument)
        return self._ask_child(subject)

    def _ask_child(self, subject: str) -> Mapping[str, Any]:
        if not self._asker:
            raise FactUnknown(f"nobody was named to answer {subject!r}")
        command = [sys.executable, "-m", self._asker, *subject.split(" ")]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=self._seconds)
            answer: Mapping[str, Any] = json.loads(done.stdout.splitlines()[-1])
        except subprocess.TimeoutExpired as error:
            raise FactUnknown(f"{subject}: no answer within {self._seconds:.0f} s") from error
        except (OSError, ValueError, IndexError) as error:
            said = done.stderr.strip().splitlines() if "done" in locals() else [str(error)]
            how = f"signal {-done.returncode}" if done.returncode < 0 else said[-1:]
            raise FactUnknown(f"{subject}: no answer: {how or 'silence'}") from error
        if "unknown" in answer:
            raise FactUnknown(str(answer["unknown"]))
        return answer


class RecordedMachine:
    """A machine as a record of it tells; what the record lacks is unknown."""

    def __init__(self, record: Mapping[str, Mapping[str, Any]]) -> None:
        self._record = record

    def text(self, path: str) -> str | None:
        """The recorded content."""
        found: str | None = self._find("files", path)
        return found

    def names(self, folder: str) -> tuple[str, ...] | None:
        """The recorded names."""
        found = self._find("folders", folder)
        return None if found is None else tuple(found)

    def variable(self, name: str) -> str | None:
        """The recorded variable."""
        found: str | None = self._find("variables", name)
        return found

    def distribution(self, name: str) -> str | None:
        """The recorded version."""
        found: str | None = self._find("distributions", name)
        return found

    def command(self, *words: str) -> str | None:
        """The recorded output."""
        found: str | None = self._find("commands", " ".join(words))
        return found

    def ask(self, subject: str) -> Mapping[str, Any]:
        """The recorded answer; one that says `unknown` raises as it did."""
        answer = self._find("answers", subject)
        if answer is None or "unknown" in answer:
            raise FactUnknown(str((answer or {}).get("unknown", f"no answer to {subject!r}")))
        found: Mapping[str, Any] = answer
        return found

    def _find(self, kind: str, key: str) -> Any:
        table = self._record.get(kind, {})
        if key not in table:
            raise FactUnknown(f"the record does not say {kind}: {key}")
        value = table[key]
        if isinstance(value, Mapping) and set(value) == {"unknown"}:
            raise FactUnknown(str(value["unknown"]))
        return value


class RecordingMachine:
    """Another machine, all of whose answers are kept in `record`."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.record: dict[str, dict[str, Any]] = {kind: {} for kind in _KINDS}

    def text(self, path: str) -> str | None:
        """The content, kept."""
        return self._keep("files", path, lambda: self._machine.text(path))

    def names(self, folder: str) -> tuple[str, ...] | None:
        """The names, kept."""
        return self._keep("folders", folder, lambda: self._machine.names(folder))

    def variable(self, name: str) -> str | None:
        """The variable, kept."""
        return self._keep("variables", name, lambda: self._machine.variable(name))

    def distribution(self, name: str) -> str | None:
        """The version, kept."""
        return self._keep("distributions", name, lambda: self._machine.distribution(name))

    def command(self, *words: str) -> str | None:
        """The output, kept."""
        return self._keep("commands", " ".join(words), lambda: self._machine.command(*words))

    def ask(self, subject: str) -> Mapping[str, Any]:
        """The answer, kept; asked once."""
        return self._keep("answers", subject, lambda: self._machine.ask(subject))

    def _keep(self, kind: str, key: str, find: Callable[[], Fact]) -> Fact:
        table = self.record[kind]
        if key not in table:
            try:
                table[key] = find()
            except FactUnknown as unknown:
                table[key] = {"unknown": str(unknown)}
        if isinstance(table[key], Mapping) and set(table[key]) == {"unknown"}:
            raise FactUnknown(table[key]["unknown"])
        kept: Fact = table[key]
        return kept


def read_record(path: Path) -> RecordedMachine:
    """Reads a record, over the one it names as `base` (a file beside it).

    In a record over a base, null for a whole kind forgets it. Raises BadInput when it is none.
    """
    return RecordedMachine(_read(path))


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        base = given.pop("base", None)
        record = _read(path.with_name(base)) if base else {kind: {} for kind in _KINDS}
        for kind in _KINDS:
            record[kind] = {**record[kind], **given.pop(kind, {})}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise BadInput(f"{path}: no record of a machine: {error}") from error
    if extra := sorted(set(given) - {"about"}):
        raise BadInput(f"{path}: unknown parts of a record: {', '.join(extra)}")
    return record


def _host(_: str) -> dict[str, Any]:
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "libc": " ".join(platform.libc_ver()).strip(),
        "memlock": None if soft == resource.RLIM_INFINITY else soft,
        "groups": sorted(_group(number) for number in {*os.getgroups(), os.getegid()}),
        "root": os.geteuid() == 0,
    }


def _group(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def _room(path: str) -> dict[str, Any]:
    """Bytes of the file system that holds a path; of its nearest parent when it does not exist."""
    place = Path(path).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        found = os.statvfs(place)
    except OSError as error:
        raise FactUnknown(f"{path}: {error.strerror}") from error
    return {
        "free": found.f_bavail * found.f_frsize,
        "total": found.f_blocks * found.f_frsize,
        "writable": os.access(place, os.W_OK),
        "exists": Path(path).exists(),
    }


def _open(path: str) -> dict[str, Any]:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
    except OSError as error:
        return {"error": error.strerror or str(error)}
    return {"error": ""}


_OWN: Mapping[str, Callable[[str], dict[str, Any]]] = {"host": _host, "room": _room, "open": _open}
