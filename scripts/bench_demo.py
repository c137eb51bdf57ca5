"""Starts a service of a store, loads it with `firstlight bench`, stops it: what `make bench` runs.

Usage: bench_demo.py STORE [bench options] [-- serve options]
"""

import sys
from pathlib import Path

from firstlight.accept.service import StartedService
from firstlight.cli.main import main as firstlight
from firstlight.errors import FirstlightError


def main(arguments: list[str]) -> int:
    """Returns the exit code of the bench, or of the service when that did not come up."""
    store, *rest = arguments
    split = rest.index("--") if "--" in rest else len(rest)
    try:
        with StartedService(Path(store), ("--port", "0", *rest[split + 1 :])) as service:
            service.wait_ready(lambda phase: print(f"  {phase}", file=sys.stderr))
            return firstlight(["bench", service.base_url, *rest[:split]])
    except FirstlightError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return problem.exit_code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
