"""Files are written whole or refused with numbers: full disks are real ones."""

import os
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.checkpoint.executor import Worker
from firstlight.checkpoint.positioned_io import InputFile, OutputFile, write_whole
from firstlight.errors import EnvironmentProblem, TensorError


def test_written_bytes_read_back_at_their_offsets(tmp_path):
    output = OutputFile(tmp_path / "f", 10)
    output.write(memoryview(b"world"), 5)
    output.write(memoryview(b"hello"), 0)
    output.sync()
    output.close()
    assert InputFile(tmp_path / "f").read(0, 10) == b"helloworld"


def test_short_reads_are_continued(tmp_path):
    (tmp_path / "f").write_bytes(bytes(range(100)))

    def dribble(descriptor, buffers, offset):
        return os.preadv(descriptor, [buffers[0][:7]], offset)

    assert InputFile(tmp_path / "f", dribble).read(3, 90) == bytes(range(3, 93))


@pytest.mark.parametrize("most", [1, 7, 1000])
def test_one_run_fills_many_buffers_in_order(tmp_path, most):
    """More buffers than one call takes, and calls that return fewer bytes than asked."""
    data = bytes(range(250)) * 20
    (tmp_path / "f").write_bytes(data)

    def reluctant(descriptor, buffers, offset):
        return os.preadv(descriptor, [buffers[0][:most]], offset)

    for call in (None, reluctant):
        buffers = [memoryview(bytearray(n % 4)) for n in range(2500)]
        InputFile(tmp_path / "f", call).read_scattered(buffers, 9)
        assert b"".join(buffers) == data[9 : 9 + sum(len(b) for b in buffers)]
    with pytest.raises(TensorError, match="ends at byte 5,000"):
        InputFile(tmp_path / "f").read_scattered([memoryview(bytearray(5000))], 1)


def test_reading_past_the_end_says_where(tmp_path):
    (tmp_path / "f").write_bytes(bytes(10))
    with pytest.raises(TensorError, match="ends at byte 10, 5 bytes before"):
        InputFile(tmp_path / "f").read(5, 10)


def test_a_device_error_names_file_and_offset(tmp_path):
    (tmp_path / "f").write_bytes(bytes(10))

    def broken(descriptor, buffers, offset):
        raise OSError(5, "Input/output error")

    with pytest.raises(EnvironmentProblem, match=r"f: cannot read at byte 4: Input/output error"):
        InputFile(tmp_path / "f", broken).read(4, 2)


def test_a_missing_file_is_an_environment_problem(tmp_path):
    with pytest.raises(EnvironmentProblem, match="cannot open"):
        InputFile(tmp_path / "absent")


LIMITED = """
import resource, sys
from pathlib import Path
from firstlight.checkpoint.positioned_io import OutputFile
from firstlight.errors import EnvironmentProblem
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    OutputFile(Path(sys.argv[1]), 200_000)
except EnvironmentProblem as error:
    print(error)
"""


def test_a_file_the_system_will_not_let_grow_is_refused_with_numbers(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "f")],
        capture_output=True, text=True, check=True, env={**os.environ},
    )  # fmt: skip
    assert "no room to reserve 195 KiB" in result.stdout
    assert "are free there" in result.stdout


def test_a_small_file_appears_whole_or_not_at_all(tmp_path):
    write_whole(tmp_path / "f", b"one")
    write_whole(tmp_path / "f", b"two")
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
    assert (tmp_path / "f").read_bytes() == b"two"


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 20_000), start=st.integers(0, 19_999), length=st.integers(0, 20_000),
    direct=st.booleans(),
)  # fmt: skip
def test_staged_reads_give_the_same_bytes_direct_or_not(
    tmp_path_factory, size, start, length, direct
):
    path = tmp_path_factory.mktemp("direct") / "f"
    data = random.Random(size).randbytes(size)
    path.write_bytes(data)
    file, worker = InputFile(path, direct=direct), Worker()
    start = min(start, size)
    wanted = data[start : start + length]
    assert bytes(file.read_staged(worker.pages, start, len(wanted))) == wanted
    with pytest.raises(TensorError, match="the file ends at byte"):
        file.read_staged(worker.pages, start, size - start + 1)
    file.close()


def test_the_page_cache_is_asked_without_reading(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(bytes(100_000))
    file = InputFile(path)
    file.read(0, 100_000)
    assert file.is_cached(50_000)
