"""The command line as a user meets it: help, exit codes, one line on stderr, no traceback."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from firstlight.cli import main as cli
from firstlight.errors import DigestMismatch, EnvironmentProblem, StoreError


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "firstlight.cli.main", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "80", **environment},
        timeout=120,
    )


def test_help_fits_a_screen_and_names_every_verb():
    result = run("--help")
    lines = result.stdout.splitlines()
    assert result.returncode == 0
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    assert all(f"\n  {verb} " in result.stdout for verb in cli.VERBS)
    assert not any(line.endswith("...") for line in lines[1:]), "a verb's one line is cut off"


def test_no_verb_shows_help_and_is_a_usage_error():
    result = run()
    assert result.returncode == 2 and "Commands:" in result.stdout


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_explains_itself_and_the_exit_codes(monkeypatch, capsys, verb):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main([verb, "--help"]) == 0
    told = capsys.readouterr().out
    assert "Exit codes: 0 all holds, 1 a check failed, 2 usage, 3 bad input" in told
    assert ("--json" in told) is (verb != "serve"), "what reports offers JSON"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serv"], "No such command 'serv'. Did you mean 'serve'?"),
        (["serve"], "Missing argument 'MODEL'"),
        (["serve", "m", "--prot", "1"], "No such option: --prot"),
        (["serve", "m", "--port", "x"], "Invalid value for '--port'"),
        (["serve", "m", "--tp", "0"], "tp (flag --tp): 0 is too small; it must be at least 1"),
        (["serve", "m", "--context", "long"], "context (flag --context): 'long' is not a count"),
        (["probe", "--device", "abacus"], "there is no platform 'abacus'"),
        (["bench", "nowhere"], "'nowhere' is no address of a service"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_two(capsys, arguments, message):
    assert cli.main(arguments) == 2
    told = capsys.readouterr()
    assert message in told.err
    assert told.err.startswith("firstlight: error: ") and told.err.count("\n") == 1
    assert told.out == ""


def test_the_process_ends_with_the_code_and_the_line():
    result = run("serv")
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("firstlight: error: No such command 'serv'")
    assert result.stderr.count("\n") == 1


def test_no_service_is_a_problem_of_the_environment():
    result = run("smoke", "http://127.0.0.1:9")
    assert result.returncode == 4
    assert result.stderr.count("\n") == 1 and "check that the service runs" in result.stderr


def test_debug_shows_the_traceback():
    result = run("probe", "--device", "abacus", FIRSTLIGHT_DEBUG="1")
    assert result.returncode == 2 and "Traceback" in result.stderr


@pytest.mark.parametrize(
    ("problem", "code", "line"),
    [
        (StoreError("2 defects\n  a\n  b\n"), 3, "firstlight: error: 2 defects\n  a\n  b\n"),
        (DigestMismatch("bytes differ"), 1, "firstlight: error: bytes differ\n"),
        (EnvironmentProblem("no disk"), 4, "firstlight: error: no disk\n"),
        (KeyboardInterrupt(), 130, "firstlight: interrupted\n"),
        (SystemExit(7), 7, ""),
    ],
)
def test_every_end_has_its_code_and_line(monkeypatch, capsys, problem, code, line):
    def verb():
        raise problem

    monkeypatch.setitem(cli.VERBS, "probe", verb)
    assert cli.main(["probe"]) == code
    assert capsys.readouterr().err == line


def test_a_bug_is_called_one_and_says_how_to_report_it(monkeypatch, capsys):
    monkeypatch.setitem(cli.VERBS, "probe", lambda: {}["x"])
    assert cli.main(["probe"]) == 70
    error = capsys.readouterr().err
    assert "a bug in firstlight: KeyError: 'x'" in error and error.count("\n") == 1


def test_help_imports_nothing_a_verb_needs_to_run():
    code = textwrap.dedent(
        """
        import json, sys
        from firstlight.cli.main import main
        main(["--help"])
        heavy = ("torch", "transformers", "numpy", "httpx", "fastapi", "pydantic", "rich", "zmq")
        print(json.dumps([name for name in heavy if name in sys.modules]))
        """
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert json.loads(result.stdout.splitlines()[-1]) == []


def test_version_reports_as_json():
    version = json.loads(run("version", "--json").stdout)
    assert set(version["data"]) == {"firstlight", "python", "torch", "system"}


def test_settings_are_shown_with_their_origin(tmp_path):
    (tmp_path / "s.json").write_text('{"max_waiting": 5}')
    result = run(
        *("serve", "m", "--context", "4K", "--settings", str(tmp_path / "s.json")),
        "--show-settings",
        FIRSTLIGHT_MAX_SEQUENCES="7",
    )
    assert "context = 4096  (flag --context)" in result.stdout
    assert "max_sequences = 7  (FIRSTLIGHT_MAX_SEQUENCES)" in result.stdout
    assert f"max_waiting = 5  (file {tmp_path / 's.json'})" in result.stdout


def test_an_unknown_variable_of_ours_stops_serve():
    result = run("serve", "m", "--show-settings", FIRSTLIGHT_MAX_SEQUENCE="7")
    assert result.returncode == 2
    assert "unknown variable FIRSTLIGHT_MAX_SEQUENCE" in result.stderr
