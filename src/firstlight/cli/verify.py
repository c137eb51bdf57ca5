"""Owns the verb `verify`: a store in, numbered steps out; the checks are adapt's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from firstlight.cli.options import AsJson
from firstlight.cli.outcome import show

Store = Annotated[Path, typer.Argument(help="directory that `shard` made")]


def verify(store: Store, as_json: AsJson = False) -> int:
    """Prove that a store is whole, byte for byte.

    Reads everything: sizes, coverage of the source, the digest of every granule and file.
    """
    from firstlight.accept.weight_reports import verify_report
    from firstlight.adapt.verify import verify_store
    from firstlight.cli.progress import progress_on_stderr

    with progress_on_stderr() as progress:
        verified = verify_store(store, progress=progress)
    return show(verify_report(verified), as_json=as_json)
