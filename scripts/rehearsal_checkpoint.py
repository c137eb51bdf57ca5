"""Owns the making of a rehearsal checkpoint: files of full size, true headers, holes for data.

    python scripts/rehearsal_checkpoint.py CONFIG TARGET

CONFIG is a config.json or its folder; an index beside it says which tensor is in which file. For
Kimi K3: 96 files, 1.56 TB by their sizes, 127 MiB on the disk. Knows nothing of what reads them.
"""

import argparse
import sys
from pathlib import Path

from firstlight.adapt.rehearsal import write_rehearsal
from firstlight.errors import FirstlightError
from firstlight.units import format_bytes, format_count


def main() -> int:
    """Writes the checkpoint and says its size; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    try:
        made = write_rehearsal(arguments.config, arguments.target)
    except FirstlightError as problem:
        sys.stderr.write(f"error: {problem}\n")
        return problem.exit_code
    print(
        f"{made.path}: {made.files} files, {format_count(made.tensors)} tensors, "
        f"{format_bytes(made.num_bytes)}, on disk {format_bytes(made.disk_bytes)}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
