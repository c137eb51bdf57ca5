"""What is made once for all test processes of a machine: one makes it, the others wait."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def one_at_a_time(what: str) -> Iterator[None]:
    """Waits until no other process of this user is making the same thing."""
    path = Path(tempfile.gettempdir()) / f"firstlight-tests-{os.getuid()}-{what}.lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
