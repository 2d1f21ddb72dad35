"""How messages are read before a template sees them, and how refusals look."""

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ConfigurationError, InvalidRequestError
from octavo_router.chat_template import MAX_REASON_CHARS, ChatTemplate, find_chat_template
from tests.unit.router.chat_templates import LLAMA3, MISTRAL, QWEN

PLAIN = ChatTemplate(
    "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}", {"bos_token": "<s>"}
)
CALL = {"function": {"name": "f", "arguments": "{}"}}


def text(*parts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": part} for part in parts]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("x", "x"),
        (text("x"), "x"),
        (text("x", "y"), "x\ny"),
        (text("x", "", "y"), "x\n\ny"),
        ([], ""),
        ("", ""),
    ],
)
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_content_becomes_one_text(role: str, content: Any, expected: str) -> None:
    assert PLAIN.render([{"role": role, "content": content}]) == f"{role}={expected};"


@pytest.mark.parametrize("message", [{"content": None}, {}])
def test_no_content_is_empty_beside_tool_calls_only(message: dict[str, Any]) -> None:
    with_calls = {"role": "assistant", "tool_calls": [CALL], **message}
    assert PLAIN.render([with_calls]) == "assistant=;"
    for role in ("user", "assistant", "tool", "system"):
        with pytest.raises(InvalidRequestError) as caught:
            PLAIN.render([{"role": "user", "content": "a"}, {"role": role, **message}])
        assert caught.value.param == "messages[1].content"


@pytest.mark.parametrize(
    ("content", "param", "words"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], "messages[0].content[0]", "image_url"),
        ([*text("a"), {"type": "input_audio"}], "messages[0].content[1]", "input_audio"),
        ([{"text": "a"}], "messages[0].content[0]", "NoneType"),
        ([{"type": "text"}], "messages[0].content[0].text", "string"),
        ([{"type": "text", "text": 5}], "messages[0].content[0].text", "string"),
        (["a"], "messages[0].content[0]", "object"),
        (5, "messages[0].content", "int"),
        ({"type": "text", "text": "a"}, "messages[0].content", "dict"),
    ],
)
def test_other_content_is_refused_by_name(content: Any, param: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        PLAIN.render([{"role": "user", "content": content}])
    assert caught.value.param == param


@pytest.mark.parametrize("role", ["robot", "", None, 5, ["user"], "\ud800" * 500])
def test_an_unknown_role_is_refused(role: Any) -> None:
    with pytest.raises(InvalidRequestError, match="must be one of system, developer") as caught:
        PLAIN.render([{"role": role, "content": "a"}])
    assert caught.value.param == "messages[0].role"
    assert len(caught.value.message.encode()) < 200


def test_a_developer_is_the_system_unless_the_template_knows_better() -> None:
    message = {"role": "developer", "content": "a"}
    assert PLAIN.render([message]) == "system=a;"
    knowing = ChatTemplate("{% if messages[0].role == 'developer' %}dev{% endif %}", {})
    assert knowing.render([message]) == "dev"
    assert message["role"] == "developer"  # the caller's message stays as it was


def test_no_messages_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="empty") as caught:
        PLAIN.render([])
    assert caught.value.param == "messages"


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'])
def test_arguments_as_text_or_object_render_alike(arguments: Any) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    assert '{"name": "f", "arguments": {"a": 1}}' in ChatTemplate(QWEN, {}).render(messages)
    assert '"parameters": {"a": 1}}' in ChatTemplate(LLAMA3, {"bos_token": ""}).render(messages)
    assert call["function"]["arguments"] == arguments


@pytest.mark.parametrize(
    ("calls", "param"),
    [
        ("x", "messages[0].tool_calls"),
        ([5], "messages[0].tool_calls[0].function"),
        ([{"function": "f"}], "messages[0].tool_calls[0].function"),
        *[
            (
                [CALL, {"function": {"name": "f", "arguments": arguments}}],
                "messages[0].tool_calls[1].function.arguments",
            )
            for arguments in ("{", "[]", "5", 5, None, "[" * 100_000)
        ],
    ],
)
def test_broken_tool_calls_are_refused_by_name(calls: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        PLAIN.render([{"role": "assistant", "content": "", "tool_calls": calls}])
    assert caught.value.param == param
    assert len(caught.value.message) < 300


def test_a_templates_refusal_is_the_requests_fault() -> None:
    template = ChatTemplate(MISTRAL, {"bos_token": "<s>", "eos_token": "</s>"})
    with pytest.raises(InvalidRequestError, match="roles must alternate") as caught:
        template.render([{"role": "user", "content": "a"}] * 2)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception(messages[0].content) }}",
        "{{ 1 + messages[0].content }}",
        "{{ messages[7].content.x }}",
        "{{ nothing() }}",
        "{{ [].append.__globals__ }}",
        "{{ messages.append(1) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_whatever_goes_wrong_inside_is_bounded_and_encodable(source: str) -> None:
    template = ChatTemplate(source, {})
    with pytest.raises(InvalidRequestError) as caught:
        template.render([{"role": "user", "content": "\ud83d" + "x" * 10_000}])
    assert len(caught.value.message.encode()) < 2 * MAX_REASON_CHARS


@pytest.mark.parametrize("source", ["{% for %}", "{{", "{% generation %}", "{% unknown %}"])
def test_a_broken_template_fails_at_start(source: str) -> None:
    with pytest.raises(ConfigurationError, match="chat template"):
        ChatTemplate(source, {})


def test_a_template_sees_its_special_tokens_and_no_file() -> None:
    template = ChatTemplate("{{ bos_token }}|{{ eos_token is defined }}", {"bos_token": "<s>"})
    assert template.render([{"role": "user", "content": "a"}]) == "<s>|False"
    with pytest.raises(InvalidRequestError):
        ChatTemplate("{% include '/etc/passwd' %}", {}).render([{"role": "user", "content": "a"}])


def test_where_a_template_is_looked_for(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert find_chat_template(tmp_path, {}) is None
    assert find_chat_template(tmp_path, {"chat_template": "S"}) == "S"
    assert find_chat_template(tmp_path, {"chat_template": named}) == "D"
    assert find_chat_template(tmp_path, {"chat_template": named[:1]}) is None
    (tmp_path / "chat_template.json").write_text('{"chat_template": "J"}')
    assert find_chat_template(tmp_path, {}) == "J"
    assert find_chat_template(tmp_path, {"chat_template": "S"}) == "S"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert find_chat_template(tmp_path, json.loads('{"chat_template": "S"}')) == "F"
