"""Conversations in the roles that chat templates take."""

from types import SimpleNamespace
from typing import Any

import jinja2
import pytest
from transformers import PreTrainedTokenizerBase

from paged_kv.server.engine.template_roles import TemplateRoles, roles_of

SHOWN = "{{ '<' + m.role + '>' + m.content }}"
TEMPLATES = {
    "any": SHOWN,
    "developer": "{% if m.role == 'developer' %}{% endif %}" + SHOWN,
    "first": "{% if m.role == 'system' and not loop.first %}{{ no() }}{% endif %}" + SHOWN,
    "drops": "{% if loop.first or m.role != 'system' %}" + SHOWN + "{% endif %}",
    "none": "{% if m.role == 'system' %}{{ no() }}{% endif %}" + SHOWN,
    "other": "{{ no() }}",
}
CHAT = [("system", "a"), ("developer", "b"), ("user", "c"), ("system", "d"), ("user", "e")]
CHAT += [("assistant", "f"), ("developer", "g")]
PLAIN = "<system>a<system>b<user>c<system>d<user>e<assistant>f<system>g"
MARKED = "c\n\n<system>\nd\n</system>\n\ne<assistant>f<user><system>\ng\n</system>"


class Tokenizer(PreTrainedTokenizerBase):  # type: ignore[misc]
    def __init__(self, name: str) -> None:
        self.chat_template = TEMPLATES[name]

    def rendered(self, messages: Any, **_: Any) -> str:
        template = "{% for m in messages %}" + str(self.chat_template) + "{% endfor %}"
        return jinja2.Environment().from_string(template).render(messages=messages)


def roles(name: str) -> tuple[TemplateRoles, Tokenizer]:
    inner = Tokenizer(name)
    tokenizer = SimpleNamespace(
        _tokenizer=inner,
        _chat_template=None,
        has_chat_template=True,
        apply_chat_template=inner.rendered,
    )
    return roles_of(tokenizer, {}), inner


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("any", PLAIN),
        ("developer", PLAIN.replace("system>b", "developer>b").replace("system>g", "developer>g")),
        ("first", f"<system>a\n\nb<user>{MARKED}"),
        ("drops", f"<system>a\n\nb<user>{MARKED}"),
        (
            "none",
            "<user><system>\na\n</system>\n\n<system>\nb\n</system>\n\n" + MARKED,
        ),
    ],
)
def test_instructions_stay_in_their_places_in_a_form_that_the_template_shows(
    name: str, expected: str
) -> None:
    known, inner = roles(name)
    messages = [{"role": role, "content": text} for role, text in CHAT]
    assert inner.rendered(known.fitted(messages, {})) == expected
    parts = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]
    for each in (fitted := known.fitted(parts, {})):
        each["content"] = "".join(part["text"] for part in each["content"])
    assert inner.rendered(fitted) == expected
    for end in range(1, len(CHAT) - 1):
        assert expected.startswith(inner.rendered(known.fitted(messages[:end], {})))


def test_a_template_that_shows_nothing_gets_what_there_is() -> None:
    messages = [{"role": role, "content": text} for role, text in CHAT]
    known, _ = roles("other")
    assert [each["content"] for each in known.fitted(messages, {})] == [text for _, text in CHAT]
    assert known.fitted(messages, {"developer": "DEVELOPER: "}) == messages
