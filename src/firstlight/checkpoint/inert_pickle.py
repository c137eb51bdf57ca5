"""Owns the reading of pickles as data: names become inert records, nothing is imported or called.

Knows only the names that torch writes around tensors; any other name is refused, with the name.
"""

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

from firstlight.errors import TensorError


class Record:
    """An object of a pickle as its parts: the name of its class or function, the arguments it was
    made with, and what its state says."""

    name = ""

    def __new__(cls, *arguments: Any) -> "Record":
        """Takes any arguments; runs nothing."""
        made = super().__new__(cls)
        object.__setattr__(made, "arguments", arguments)
        object.__setattr__(made, "state", {})
        return made

    arguments: tuple[Any, ...]
    state: Any

    def __init__(self, *arguments: Any) -> None:
        """Keeps nothing more than `__new__` did."""

    def __setstate__(self, state: Any) -> None:
        object.__setattr__(self, "state", state)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name}: records of a pickle do not change")

    def __hash__(self) -> int:
        return id(self)

    def field(self, name: str) -> Any:
        """Returns a field of the state, None when there is none."""
        return self.state.get(name) if isinstance(self.state, dict) else None


def read_inert(raw: bytes, where: str, known: Mapping[str, str]) -> Any:
    """Returns what a pickle holds: plain containers, numbers and text as they are, the rest as
    Record. `known` maps the names that may occur (`module name`) to names of records; a name ending
    in `*` stands for all that begin so.

    Raises TensorError, the name in it, for a pickle that names anything else or is damaged.
    """
    try:
        return _Reader(raw, where, known).load()
    except TensorError:
        raise
    except Exception as error:  # damaged bytes raise whatever the opcode at hand raises
        raise TensorError(f"{where}: not a pickle that can be read: {error}") from error


class _Reader(pickle.Unpickler):
    """The standard machine for opcodes, with nothing in reach that it could run."""

    def __init__(self, raw: bytes, where: str, known: Mapping[str, str]) -> None:
        super().__init__(io.BytesIO(raw))
        self._where, self._known = where, known
        self._types: dict[str, type[Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Returns a type of inert records, made anew for each pickle."""
        asked = f"{module} {name}"
        found = self._known.get(asked) or self._known.get(f"{module} *")
        if found is None:
            raise TensorError(
                f"{self._where}: names {module}.{name}, which is no part of weights; it was not "
                "run. Weights from a source you do not know should be safetensors"
            )
        if found == "dict":
            return _plain_dict
        record = found.replace("*", name)
        if record not in self._types:
            self._types[record] = type("Record", (Record,), {"name": record})
        return self._types[record]

    def persistent_load(self, pid: Any) -> Any:
        """Returns the reference to a storage as a record."""
        made = Record(*pid) if isinstance(pid, tuple) else Record(pid)
        return made


_plain_dict: Callable[..., dict[Any, Any]] = dict
