"""Settings: precedence, origins, and refusals that list every offender."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.errors import BadInput, UsageError
from firstlight.settings.serve import ServeSettings
from firstlight.settings.settings import fields_of, flag_of, resolve, variable_of


def serve(flags=(), environment=(), file=None):
    return resolve(ServeSettings, {"model": "m", **dict(flags)}, dict(environment), file)


def written(path, content):
    path.write_text(json.dumps(content))
    return path


def test_flag_beats_environment_beats_file_beats_default(tmp_path):
    file = written(tmp_path / "s.json", {"port": 1, "tp": 2, "max_waiting": 3})
    found = serve({"port": 9}, {"FIRSTLIGHT_PORT": "8", "FIRSTLIGHT_TP": "4"}, file)
    assert (found.value.port, found.value.tp, found.value.max_waiting) == (9, 4, 3)
    assert found.value.block_size == 16
    origins = {
        name: found.origins[name].source for name in ("port", "tp", "max_waiting", "block_size")
    }
    assert list(origins.values()) == ["flag", "environment", "file", "default"]


def test_describe_names_each_value_with_its_origin_and_hides_secrets(tmp_path):
    lines = serve({"api_key": "s3cret"}, {"FIRSTLIGHT_TP": "2"}).describe()
    assert "tp = 2  (FIRSTLIGHT_TP)" in lines
    assert "context = the model's own  (default)" in lines
    assert "api_key = (set)  (flag --api-key)" in lines
    assert len(lines) == len(fields_of(ServeSettings))


def test_every_unknown_key_is_listed_at_once(tmp_path):
    file = written(tmp_path / "s.json", {"prot": 1, "tpp": 2})
    with pytest.raises(UsageError) as caught:
        serve({"colour": 1}, {"FIRSTLIGHT_TPP": "2", "HOME": "/"}, file)
    for offender in ("--colour", "FIRSTLIGHT_TPP", "'prot'", "'tpp'"):
        assert offender in str(caught.value)


def test_every_bad_value_is_listed_at_once_with_its_origin():
    with pytest.raises(UsageError) as caught:
        serve({"port": "x"}, {"FIRSTLIGHT_DTYPE": "int9", "FIRSTLIGHT_TP": "0"})
    text = str(caught.value)
    assert "port (flag --port): 'x' is not a whole number" in text
    assert "dtype (FIRSTLIGHT_DTYPE): 'int9' is none of float32" in text
    assert "tp (FIRSTLIGHT_TP): 0 is too small" in text


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("kv_budget_bytes", "2GiB", 2 * 1024**3),
        ("kv_budget_bytes", "auto", None),
        ("context", "128K", 131072),
        ("skip_gate", "yes", True),
        ("check_digests", "off", False),
        ("drain_seconds", "2.5", 2.5),
    ],
)
def test_text_is_read_as_the_field_means_it(name, text, value):
    assert getattr(serve((), {variable_of(name): text}).value, name) == value


@pytest.mark.parametrize("flags", [True, False])
def test_an_empty_key_is_refused_rather_than_taken_for_none(flags):
    given = ({"api_key": ""}, {}) if flags else ((), {"FIRSTLIGHT_API_KEY": ""})
    with pytest.raises(UsageError, match="api_key is empty"):
        serve(*given)


@pytest.mark.parametrize("word", ["none", "auto"])
def test_words_for_left_out_are_text_like_any_other_in_a_text(word):
    assert serve({"api_key": word}).value.api_key == word


@pytest.mark.parametrize("content", ["{", "[1]", "[" * 100_000, None])
def test_a_file_that_is_no_settings_file_is_bad_input(tmp_path, content):
    file = tmp_path / "s.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(BadInput, match=str(file)):
        serve(file=file)


def test_a_missing_model_says_how_to_give_it():
    with pytest.raises(UsageError, match="model is not given; use --model or FIRSTLIGHT_MODEL"):
        resolve(ServeSettings, {}, {})


def test_contradictions_are_refused():
    with pytest.raises(UsageError, match="chunk_tokens 512 exceeds max_batch_tokens 32"):
        serve({"max_batch_tokens": 32, "chunk_tokens": 512})


@given(value=st.one_of(st.booleans(), st.floats(), st.text(), st.lists(st.integers())))
def test_whatever_a_file_holds_is_read_or_refused(tmp_path_factory, value):
    file = written(tmp_path_factory.mktemp("s") / "s.json", {"port": value})
    try:
        found = serve(file=file).value.port
    except UsageError:
        return
    assert isinstance(found, int) and not isinstance(found, bool)


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        serve().value.port = 1


def test_threads_divide_the_cores_unless_given():
    assert serve({"tp": 4}).value.threads_per_rank(16) == 4
    assert serve({"tp": 4}).value.threads_per_rank(2) == 1
    assert serve({"tp": 4, "threads": 3}).value.threads_per_rank(16) == 3


@pytest.mark.parametrize("name", list(fields_of(ServeSettings)))
def test_flags_and_variables_follow_from_names(name):
    assert flag_of(name).startswith("--") and "_" not in flag_of(name)
    assert variable_of(name) == "FIRSTLIGHT_" + name.upper()
