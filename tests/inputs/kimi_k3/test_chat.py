"""Kimi K3's chat format writes what the reference writes, token for token, and refuses the rest."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.errors import ConfigError, RequestError
from firstlight.inputs.chat_format import RenderedPrompt, RenderOptions, load_chat_format
from firstlight.inputs.kimi_k3.encoder import EncoderOptions, chat_segments
from firstlight.inputs.kimi_k3.segments import Segment
from firstlight.inputs.template_format import TemplateFormat
from firstlight.inputs.tokenizer import load_tokenizer
from k3_text import CHECKPOINT, k3_cases, k3_format, k3_tokenizer

CASES = {case["name"]: case for case in k3_cases("chat")}
RENDERED = [case for case in CASES.values() if "rejected" not in case]
REJECTED = [case for case in CASES.values() if "rejected" in case]
# What requests are kept from: literal placeholders, images nobody read, roles nobody knows.
NOT_FOR_REQUESTS = {
    "image_without_prompts_keeps_placeholder",
    "image_in_tool_result_and_placeholder_in_text",
    "unknown_role_renders_nothing",
}
HI = [{"role": "user", "content": "hi"}]
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}


def name_of(case: Mapping[str, Any]) -> str:
    return str(case["name"])


def segments_of(case: Mapping[str, Any]) -> list[Segment]:
    names = {"thinking_effort": "effort", "images": "image_sizes"}
    options = {names.get(key, key): value for key, value in case["options"].items()}
    return chat_segments(case["messages"], case["tools"], EncoderOptions(**options))


def rendered(case: Mapping[str, Any]) -> RenderedPrompt:
    given = case["options"]
    options = RenderOptions(
        tool_choice=given.get("tool_choice"),
        response_format=given.get("response_format"),
        template_kwargs={k: v for k, v in given.items() if k in ("thinking", "thinking_effort")},
        image_sizes=[(width, height) for width, height in given.get("images", ())],
    )
    return k3_format().render(
        case["messages"],
        tools=case["tools"],
        add_generation_prompt=given.get("add_generation_prompt", True),
        options=options,
    )


def test_all_cases_are_there() -> None:
    assert (len(RENDERED), len(REJECTED)) == (35, 5)
    assert CASES.keys() >= NOT_FOR_REQUESTS


@pytest.mark.parametrize("case", RENDERED, ids=name_of)
def test_segments_and_ids_are_those_of_the_reference(case: dict[str, Any]) -> None:
    segments = segments_of(case)
    assert [[segment.text, int(segment.special)] for segment in segments] == case["segments"]
    tokenizer = k3_tokenizer()
    ids: list[int] = []
    for text, special in segments:
        if special:
            ids += tokenizer.encode(text, add_special=False)
        else:
            ids += tokenizer.encode_plain(text)
    assert ids == case["token_ids"]


@pytest.mark.parametrize("case", REJECTED, ids=name_of)
def test_what_the_reference_refuses_is_refused(case: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        segments_of(case)


@pytest.mark.parametrize(
    "case", [case for case in RENDERED if case["name"] not in NOT_FOR_REQUESTS], ids=name_of
)
def test_requests_are_rendered_token_for_token(case: dict[str, Any]) -> None:
    prompt = rendered(case)
    assert prompt.token_ids == case["token_ids"]
    assert prompt.text == "".join(text for text, _ in case["segments"])
    pads = [i for i, token_id in enumerate(prompt.token_ids) if token_id == 405]
    assert list(prompt.image_positions) == pads
    assert len(pads) == len(case.get("pad_counts", ()))
    options = case["options"]
    assert prompt.thinking == (
        options.get("thinking", True) and options.get("add_generation_prompt", True)
    )


@pytest.mark.parametrize(
    "case",
    [c for c in REJECTED if c["name"] != "user_literal_placeholder_steals_a_slot"],
    ids=name_of,
)
def test_requests_the_reference_refuses_are_refused(case: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        rendered(case)


def test_a_literal_placeholder_takes_no_image() -> None:
    prompt = rendered(CASES["user_literal_placeholder_steals_a_slot"])
    assert prompt.token_ids == CASES["literal_placeholder_neutralised"]["token_ids"]


def test_images_nobody_read_are_refused() -> None:
    with pytest.raises(RequestError, match="1 images in the messages, but 0 were read"):
        k3_format().render([{"role": "user", "content": [PICTURE]}])


def test_the_developer_is_the_system_and_other_roles_are_refused() -> None:
    developer = k3_format().render([{"role": "developer", "content": "x"}])
    assert developer == k3_format().render([{"role": "system", "content": "x"}])
    with pytest.raises(RequestError, match="role is 'critic'") as caught:
        k3_format().render([*HI, {"role": "critic", "content": "x"}])
    assert caught.value.parameter == "messages[1].role"


@pytest.mark.parametrize("effort", ["low", "high", "max"])
def test_an_effort_is_the_same_as_the_format_s_own_variable(effort: str) -> None:
    asked = k3_format().render(HI, options=RenderOptions(reasoning_effort=effort))
    assert asked == k3_format().render(HI, kwargs={"thinking_effort": effort})
    assert asked.thinking


def test_effort_none_is_no_thinking() -> None:
    prompt = k3_format().render(HI, options=RenderOptions(reasoning_effort="none"))
    assert prompt == k3_format().render(HI, kwargs={"thinking": False})
    assert not prompt.thinking


@pytest.mark.parametrize("effort", ["minimal", "medium", "xhigh"])
def test_other_efforts_are_refused_with_those_there_are(effort: str) -> None:
    with pytest.raises(RequestError, match="takes none, low, high, max") as caught:
        k3_format().render(HI, options=RenderOptions(reasoning_effort=effort))
    assert caught.value.parameter == "reasoning_effort"


@pytest.mark.parametrize("kwargs", [{"tone": 1}, {"thinking": "yes"}, {"messages": []}])
def test_unknown_variables_are_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        k3_format().render(HI, kwargs=kwargs)
    assert caught.value.parameter == "chat_template_kwargs"


def test_a_named_function_is_written_as_required() -> None:
    named = {"type": "function", "function": {"name": "calc"}}
    case = CASES["tool_choice_required"]
    prompt = k3_format().render(HI, tools=case["tools"], options=RenderOptions(tool_choice=named))
    assert prompt.token_ids == case["token_ids"]


markup = st.sampled_from(["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "<|media_pad|>"])
hostile = st.lists(markup | st.text(max_size=3) | st.just('message role="system"')).map("".join)


@given(hostile, hostile, hostile, hostile)
def test_no_text_of_a_request_becomes_a_control_token(a: str, b: str, c: str, d: str) -> None:
    def controls(a: str, b: str, c: str, d: str) -> list[int]:
        call = {"function": {"name": f"n{a}", "arguments": {f"k{b}": f"v{c}"}}}
        messages = [
            {"role": "system", "content": f"s{a}", "name": f"n{d}"},
            {"role": "user", "content": [{"type": "text", "text": f"u{b}"}, PICTURE]},
            {
                "role": "assistant",
                "content": f"a{c}",
                "reasoning_content": f"r{d}",
                "tool_calls": [call],
            },
            {"role": "tool", "content": f"t{a}", "tool": f"n{b}"},
        ]
        tools = [{"type": "function", "function": {"name": f"n{c}", "description": f"d{d}"}}]
        options = RenderOptions(image_sizes=[(7, 9)])
        prompt = k3_format().render(messages, tools=tools, options=options)
        assert len(prompt.image_positions) == 1
        return [token_id for token_id in prompt.token_ids if token_id >= 384]

    assert controls(a, b, c, d) == controls("", "", "", "")


def test_a_template_in_the_folder_does_not_win(tmp_path: Path) -> None:
    for name in ("tiktoken.model", "tokenizer_config.json", "config.json"):
        shutil.copyfile(CHECKPOINT / name, tmp_path / name)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    tokenizer = k3_tokenizer()
    loaded = load_chat_format(tmp_path, tokenizer)
    assert loaded.render(HI) == k3_format().render(HI)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k2"}))
    assert isinstance(load_chat_format(tmp_path, tokenizer), TemplateFormat)
    (tmp_path / "config.json").unlink()
    assert load_chat_format(tmp_path, tokenizer).takes_images


def test_a_tokenizer_without_the_markers_is_refused(tmp_path: Path) -> None:
    k3_tokenizer().export_hf(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del settings["added_tokens_decoder"]["389"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    shutil.copyfile(CHECKPOINT / "config.json", tmp_path / "config.json")
    with pytest.raises(ConfigError, match=r"no token <\|sep\|>"):
        load_chat_format(tmp_path, load_tokenizer(tmp_path))
