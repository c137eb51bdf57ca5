"""Owns the private folders that hold the sockets between processes, and what a kill left of them.

A folder's name carries the process id of its owner, so that the next start knows the orphans.
"""

import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "firstlight-sockets-"


def make_socket_folder() -> Path:
    """Makes a folder only this user can enter, after removing those whose owners are gone."""
    remove_orphans(Path(tempfile.gettempdir()))
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))


def remove_orphans(parent: Path) -> None:
    """Removes this user's socket folders in `parent` that belong to no living process."""
    for folder in parent.glob(f"{PREFIX}*"):
        owner = folder.name.removeprefix(PREFIX).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(folder, ignore_errors=True)
