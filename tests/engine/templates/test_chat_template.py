"""Chat templates: the conventions they rely on, the sandbox, and refusals in words."""

import json
from typing import Any

import pytest

from pagoda.base.errors import ConfigError, RequestError
from pagoda.engine.templates.chat_template import ChatTemplate
from pagoda.engine.templates.chat_values import normal_message, with_known_roles
from pagoda.engine.templates.generic_tools import with_generic_tools

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HI = [{"role": "user", "content": "Hi"}]


def test_messages_and_generation_prompt() -> None:
    assert ChatTemplate(CHATML).render(HI) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert ChatTemplate(CHATML).render(HI, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


@pytest.mark.parametrize("content", ["end", "Sure, ", "i", "a\n\n"])
@pytest.mark.parametrize("trim", [False, True])
def test_continue_final_message_ends_inside_the_last_message(content: str, trim: bool) -> None:
    template = ChatTemplate(CHATML.replace("m['content']", "m['content'] | trim") if trim else CHATML)
    messages = [*HI, {"role": "assistant", "content": content}]
    text = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n" + (content.rstrip() if trim else content)


@pytest.mark.parametrize("said", ["And now?", [{"type": "text", "text": "And now?"}]])
def test_turns_alternate_though_results_of_calls_are_the_users_and_it_says_more(said: Any) -> None:
    """As agents do, which send results with reminders, to a model without tools such as Gemma 3."""
    wants = "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
    template = CHATML.replace("{{ '<|im_start|>'", wants + "{{ '<|im_start|>'")
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    results = [{"role": "tool", "content": text} for text in ("rain", "snow")]
    asked = [*HI, {"role": "assistant", "tool_calls": [call, call]}, *results, {"role": "user", "content": said}]
    text = ChatTemplate(template).render(with_generic_tools(asked, None, template))
    rain, snow = (f"<tool_response>\n{one}\n</tool_response>\n" for one in ("rain", "snow"))
    assert text.endswith(f"<|im_start|>user\n{rain}{snow}And now?<|im_end|>\n<|im_start|>assistant\n")


# As many templates: of the roles that it does not know, and of later system messages, it writes nothing.
FEW_ROLES = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant') or m.role == 'system' and loop.first %}"
    "{{ m.role }}: {{ m.content | replace('/no_think', '') | trim }}\n{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("content", ["Be brief.", [{"type": "text", "text": "Be brief."}]])
def test_what_a_developer_says_is_the_systems_unless_the_template_knows_developers(content: Any) -> None:
    asked = [{"role": "developer", "content": content}, *HI]
    assert ChatTemplate(FEW_ROLES).render(with_known_roles(asked, FEW_ROLES)) == "system: Be brief.\nuser: Hi\n"
    assert with_known_roles(asked, FEW_ROLES.replace("'system'", "'developer'")) == asked
    assert with_known_roles(["x", *asked], "")[0] == "x"


def test_a_message_that_the_template_leaves_out_is_refused_by_its_place() -> None:
    template = ChatTemplate(FEW_ROLES)
    for role in ("king", "system"):
        for said in ("Be brief.", [{"type": "text", "text": "Be brief."}]):
            with pytest.raises(RequestError, match=rf"^messages\[1\].role: .* leaves out a message of role '{role}'"):
                template.render([*HI, {"role": role, "content": said}, *HI])
    assert template.render([*HI, {"role": "king", "content": " "}]) == "user: Hi\n"  # nothing is lost
    assert template.render([{"role": "system", "content": "/no_think"}, *HI]) == "system: \nuser: Hi\n"  # it was read
    fails = ChatTemplate(FEW_ROLES.replace("trim", "trim | replace('probe_content', 1 / 0)"))
    with pytest.raises(RequestError, match="division by zero"):
        fails.render(HI)


OF_PARTS = (
    "{% for m in messages %}{% if m.role == 'user' or loop.first %}{{ m.role }}: {% if m.content is string %}"
    "{{ m.content }}{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}\n{% endif %}"
    "{% endfor %}"
)


def test_leading_messages_of_the_system_are_joined_where_the_template_reads_one() -> None:
    said: list[Any] = [{"role": "system", "content": text} for text in ("Be brief.", "Be kind.", "Be exact.")]
    joined = "system: Be brief.\n\nBe kind.\n\nBe exact.\nuser: Hi\n"
    assert ChatTemplate(FEW_ROLES).render([*said, *HI]) == joined
    parts = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in said]
    assert "Be brief.Be kind.Be exact." in ChatTemplate(OF_PARTS).render([*parts, *HI], reads_images=True)
    with pytest.raises(RequestError, match=r"^messages\[4\].role: .* 'system' in this place"):
        ChatTemplate(FEW_ROLES).render([*said, *HI, {"role": "system", "content": "Be late."}])
    assert ChatTemplate(CHATML).render([*said, *HI]).count("<|im_start|>system") == 3  # as the template has them


def test_text_parts_are_joined_and_other_parts_refused() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template.render([{"role": "user", "content": parts}]) == "a\nb"
    with pytest.raises(RequestError, match="image_url"):
        template.render([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


def test_conventions() -> None:
    source = (
        "{{ bos_token }}{%- for m in messages %}{% if m.content == 'no' %}{% continue %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
        "|{{ tools | tojson }}|{{ strftime_now('%Y') | length }}|{{ extra }}"
        "{% set ns = namespace(found=1) %}{% set ns.found = 2 %}|{{ ns.found }}"
    )
    tools = [{"type": "function", "function": {"name": "f<>", "description": "é"}}]
    messages = [{"role": "system", "content": "no"}, *HI, *HI]
    text = ChatTemplate(source, {"bos_token": "<s>"}).render(messages, tools, template_kwargs={"extra": "E"})
    assert text == f"<s>Hi|{json.dumps(tools, ensure_ascii=False)}|4|E|2"


def test_named_templates_and_tools() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "tools"})
    assert template.render(HI) == "plain"
    assert template.render(HI, [{"type": "function"}]) == "tools"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[9].role }}", "has no element 9"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "OverflowError"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "__class__"),
    ],
)
def test_what_a_template_may_not_do_is_the_requests_error(source: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        ChatTemplate(source).render(HI)


def test_a_template_that_is_not_jinja_is_refused_when_loaded() -> None:
    with pytest.raises(ConfigError, match="line 2"):
        ChatTemplate("ok\n{% for %}")


@pytest.mark.parametrize(
    "messages",
    [[], ["text"], [{"content": "no role"}], [{"role": "user"}], [{"role": "user", "content": 3}]],
)
def test_malformed_messages(messages: list[object]) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(CHATML).render(messages)  # type: ignore[arg-type]
    assert caught.value.param == "messages"


def test_messages_given_are_not_changed() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    ChatTemplate(CHATML).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert messages == [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("part", "param", "said"),
    [
        ({"type": "text", "text": 5}, "messages[1].content[1].text", "expected a string"),
        ({"type": "text"}, "messages[1].content[1].text", "expected a string"),
        ({"type": "image_url", "image_url": {}}, "messages[1].content[1]", "a part of type 'image_url'"),
        ({"type": None}, "messages[1].content[1]", "a part of type None"),
        (7, "messages[1].content[1]", "a part of type 'int'"),
    ],
)
def test_a_bad_content_part_is_named_itself(part: Any, param: str, said: str) -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, part]},
    ]
    with pytest.raises(RequestError, match=said) as caught:
        ChatTemplate("{{ messages[0].content }}").render(messages)  # type: ignore[arg-type]
    assert caught.value.param == param


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_templates_read_the_reasoning_of_a_turn_under_any_name(name: str) -> None:
    turn = normal_message(0, {"role": "assistant", "content": "x", name: "thought"})
    assert [turn[one] for one in ("reasoning", "reasoning_content", "thinking")] == ["thought"] * 3


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"content": None, "refusal": "No."}, "No."),
        ({"refusal": "No."}, "No."),
        ({"content": "Yes.", "refusal": None}, "Yes."),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, "No."),
        ({"content": [{"type": "text", "text": "I say:"}, {"type": "refusal", "refusal": "no."}]}, "I say:\nno."),
        ({"content": None, "reasoning": "Hm."}, ""),
    ],
)
def test_messages_of_openais_types(message: dict[str, Any], content: str) -> None:
    assert ChatTemplate("{{ messages[0].content }}").render([{"role": "assistant", **message}]) == content


def test_a_refusal_that_is_no_string_is_named() -> None:
    with pytest.raises(RequestError, match="expected a string") as caught:
        normal_message(0, {"role": "assistant", "content": [{"type": "refusal"}]})
    assert caught.value.param == "messages[0].content[0].refusal"


def test_the_variables_of_transformers_are_defined() -> None:
    names = ("messages", "tools", "documents", "add_generation_prompt")
    source = "".join(f"{{{{ {name} is defined }}}}{{{{ {name} is none }}}} " for name in names)
    assert ChatTemplate(source).render(HI) == "TrueFalse TrueTrue TrueTrue TrueFalse "


CALLS = "{% for c in m.tool_calls %}{{ c.function.name }}ARGUMENTS{% endfor %}"
AS_OBJECT, AS_TEXT = "{{ c.function.arguments | tojson }}", "{{ c.function.arguments + '' }}"


@pytest.mark.parametrize("arguments", [AS_OBJECT, AS_TEXT])
@pytest.mark.parametrize(
    "condition",
    [
        "{% if m.content is not defined %}CALLS{% else %}{{ m.content }}{% endif %}",
        "{% if m['content'] is none %}CALLS{% else %}{{ m.content }}{% endif %}",
        "{{ m['content'] + '' }}CALLS",
        "CALLS",
    ],
)
@pytest.mark.parametrize("given", [{}, {"content": None}])
@pytest.mark.parametrize("written", ['{"a": "é"}', {"a": "é"}])
def test_calls_are_given_in_the_form_that_the_template_shows(
    arguments: str, condition: str, given: dict[str, Any], written: object
) -> None:
    shown = condition.replace("CALLS", CALLS.replace("ARGUMENTS", arguments))
    result = "{% if m.role == 'tool' %}{{ m.content }}{% endif %}"
    source = f"{{% for m in messages %}}{{% if m.tool_calls %}}{shown}{{% endif %}}{result}{{% endfor %}}"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": written}}
    turns = [*HI, {"role": "assistant", "tool_calls": [call], **given}, {"role": "tool", "content": "R"}]
    assert ChatTemplate(source).render(turns) == 'f{"a": "é"}R'


@pytest.mark.parametrize("written", [None, "null", "", " ", "{}", {}])
def test_arguments_that_are_nothing_are_an_empty_object(written: object) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": written}}
    turn = normal_message(0, {"role": "assistant", "tool_calls": [call]})
    assert turn["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("written", [[1], 3, 0, True, False, [], "[1]", "3", "false", '"a"', "a", "{"])
def test_arguments_that_are_no_object_are_refused(written: object) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": written}}
    with pytest.raises(RequestError, match="arguments: expected a JSON object, or a string with one") as caught:
        normal_message(0, {"role": "assistant", "tool_calls": [call]})
    assert caught.value.param == "messages[0].tool_calls[0].function.arguments"
