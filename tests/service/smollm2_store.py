"""The real model's store, converted once for each state of the code that converts.

Knows where it is kept; the conversion is the command line's own.
"""

import hashlib
import shutil
from pathlib import Path

import fetch_smollm2
import firstlight
from firstlight.accept.convert import convert
from firstlight.checkpoint.store_names import is_store
from one_at_a_time import one_at_a_time

_CONVERTING = ("accept", "adapt", "assembly", "checkpoint", "inputs", "models", "sharding")


def smollm2_store(gguf: Path) -> Path:
    """Returns the store of SmolLM2, made again when the file, the rules or any code of it changed.

    It is kept beside the downloads, so that a second test run begins at once.
    """
    kept = fetch_smollm2.cache_directory() / "test-stores"
    store = kept / f"smollm2-{_digest(gguf)}"
    with one_at_a_time("smollm2-store"):
        if not is_store(store):
            shutil.rmtree(kept, ignore_errors=True)
            convert(gguf, store)
    return store


def _digest(gguf: Path) -> str:
    digest = hashlib.sha256(fetch_smollm2.GGUF_SHA256.encode())
    source = Path(firstlight.__file__).parent
    for package in _CONVERTING:
        for path in sorted((source / package).rglob("*.py")):
            digest.update(path.relative_to(source).as_posix().encode() + path.read_bytes())
    assert gguf.is_file()
    return digest.hexdigest()[:16]
