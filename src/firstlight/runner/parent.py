"""Owns the end of a process whose parent has gone, whatever it is busy with; knows nothing of its
work.
"""

import os
import threading
import time
from collections.abc import Callable

LOOK_SECONDS = 0.5


def watch_parent(parent_id: int, on_gone: Callable[[], object]) -> None:
    """Calls `on_gone`, from a thread of its own, once `parent_id` is no longer the parent.

    The id is told by the parent itself: a child that asks may already have been handed to another.
    """

    def watch() -> None:
        while os.getppid() == parent_id:
            time.sleep(LOOK_SECONDS)
        on_gone()

    threading.Thread(target=watch, name="parent watch", daemon=True).start()
