"""Reading this machine: what is there, what is not, and what cannot be told."""

import json
import sys

import pytest

from firstlight.platforms.machine import FactUnknown, LiveMachine, RecordingMachine

MACHINE = LiveMachine("firstlight.adapt.probe.ask")


def test_what_is_absent_is_none_and_what_fails_is_unknown(tmp_path):
    assert MACHINE.text(str(tmp_path / "nothing")) is None
    assert MACHINE.names(str(tmp_path / "nothing")) is None
    assert MACHINE.distribution("no-such-package-of-anybody") is None
    assert MACHINE.command("no-such-command-of-anybody") is None
    with pytest.raises(FactUnknown, match="Is a directory"):
        MACHINE.text(str(tmp_path))
    with pytest.raises(FactUnknown, match=r"failed: .*no words"):
        MACHINE.command(sys.executable, "-c", "raise SystemExit('no words')")


def test_what_is_there_is_read(tmp_path, monkeypatch):
    (tmp_path / "b").write_text("two")
    (tmp_path / "a").write_text("one")
    monkeypatch.setenv("FOR_THIS_TEST", "1")
    assert MACHINE.names(str(tmp_path)) == ("a", "b") and MACHINE.text(str(tmp_path / "b")) == "two"
    assert MACHINE.variable("FOR_THIS_TEST") == "1"
    assert MACHINE.command(sys.executable, "-c", "print(3)") == "3\n"
    assert MACHINE.distribution("msgspec")


def test_room_is_that_of_the_nearest_folder_there_is(tmp_path):
    found = MACHINE.ask(f"room {tmp_path / 'not' / 'yet'}")
    assert 0 < found["free"] <= found["total"] and found["writable"] and not found["exists"]


def test_a_library_is_judged_by_loading_it():
    found = MACHINE.ask("libraries libc.so.6,libnobody_has_this.so")
    assert found["libc.so.6"]["error"] == "" and "libc" in found["libc.so.6"]["path"]
    assert "cannot open shared object" in found["libnobody_has_this.so"]["error"]


def test_an_asker_that_dies_or_hangs_leaves_the_probe_alive(tmp_path, monkeypatch):
    (tmp_path / "dying.py").write_text("import os; os.abort()")
    (tmp_path / "hanging.py").write_text("import time; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(FactUnknown, match="no answer: signal 6"):
        LiveMachine("dying").ask("torch cpu")
    with pytest.raises(FactUnknown, match="no answer within 1 s"):
        LiveMachine("hanging", seconds=1.0).ask("torch cpu")


def test_a_question_that_fails_is_unknown_with_its_reason():
    with pytest.raises(FactUnknown, match="cpu has no library that tells of its cards"):
        MACHINE.ask("cards cpu")


def test_a_recording_keeps_what_is_unknown_as_unknown():
    recording = RecordingMachine(MACHINE)
    for _ in range(2):
        with pytest.raises(FactUnknown):
            recording.ask("cards cpu")
    assert recording.record["answers"]["cards cpu"] == {
        "unknown": "LookupError: cpu has no library that tells of its cards"
    }
    json.dumps(recording.record)
