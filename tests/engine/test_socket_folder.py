"""Folders of sockets: private, named for their owner, swept when the owner is gone."""

import subprocess
import sys

from firstlight.engine.socket_folder import PREFIX, make_socket_folder, remove_orphans


def test_a_folder_is_private_and_survives_the_sweep_while_its_owner_lives():
    folder = make_socket_folder()
    try:
        assert folder.stat().st_mode & 0o777 == 0o700
        remove_orphans(folder.parent)
        assert folder.is_dir()
    finally:
        folder.rmdir()


def test_the_folder_of_a_process_that_is_gone_is_removed(tmp_path):
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True
    ).stdout.strip()
    orphan = tmp_path / f"{PREFIX}{gone}-x"
    (orphan / "inner").mkdir(parents=True)
    other = tmp_path / "firstlight-notes"
    other.mkdir()
    remove_orphans(tmp_path)
    assert not orphan.exists() and other.exists()
