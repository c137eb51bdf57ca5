"""Owns the verb `verify`: a store or a running service in, checks out; they are made elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firstlight.cli.options import AsJson, options_from
from firstlight.cli.outcome import show
from firstlight.errors import UsageError
from firstlight.settings.settings import resolve_flags, setting


@dataclass(frozen=True, kw_only=True)
class VerifyFlags:
    """What the verb takes: one of the first two."""

    store: Path | None = setting(None, "directory that `shard` made", optional_text="none")
    live: str = setting("", "address of a service whose weights in memory are compared instead")
    api_key: str = setting("", "key to send to the service", secret=True)
    timeout_seconds: float = setting(600.0, "time limit of that comparison", minimum=0.001)


@options_from(VerifyFlags, arguments=("store",))
def verify(flags: Mapping[str, Any], as_json: AsJson = False) -> int:
    """Prove that a store is whole, byte for byte.

    Reads everything: sizes, coverage of the source, the digest of every granule and file. With
    --live, has a running service compare the weights in its memory with what it loaded."""
    given = resolve_flags(VerifyFlags, flags)
    if (given.store is None) == (not given.live):
        raise UsageError("verify takes a store, or --live URL")
    if given.store is None:
        from firstlight.accept.client import Endpoint
        from firstlight.accept.live_weights import check_live_weights

        endpoint = Endpoint(given.live, given.api_key, given.timeout_seconds)
        return show(check_live_weights(endpoint), as_json=as_json)
    from firstlight.accept.weight_reports import verify_report
    from firstlight.adapt.verify import verify_store
    from firstlight.cli.progress import progress_on_stderr

    with progress_on_stderr() as progress:
        verified = verify_store(given.store, progress=progress)
    return show(verify_report(verified), as_json=as_json)
