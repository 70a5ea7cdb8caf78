"""The chats that other interfaces ask for: their limits, and images in results of tools."""

from typing import Any

import pytest

from paged_kv.server.completions.chat_messages import chat_request, shown_by_user
from paged_kv.server.http.api_errors import APIError
from paged_kv.server.http.schema import SharedFields


def image(name: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": name}}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def tool(*content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "1", "content": list(content)}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def test_they_come_before_what_is_said_then() -> None:
    answer = {"role": "assistant", "content": "I see."}
    first = [user(text("Look."), image("0")), tool(image("1"))]
    assert shown_by_user([*first, user(text("Well?"), image("2"))]) == [
        *(first[0], tool(), user(image("1"), text("Well?"), image("2"))),
    ]
    said = {"role": "user", "content": "Well?"}
    assert shown_by_user([tool(image("1")), said]) == [tool(), user(image("1"), text("Well?"))]
    assert shown_by_user([tool(image("1")), answer, tool(image("1"))]) == [
        *(tool(), user(image("1")), answer, tool(), user(image("1"))),
    ]


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("messages", []),
        ("messages", [user()] * 2049),
        ("messages", [user(*[text("a")] * 2049)]),
        ("messages", [{**user(), "tool_calls": [{}] * 1025}]),
        ("tools", [{}] * 1025),
    ],
)
def test_what_items_become_has_limits(field: str, given: Any) -> None:
    with pytest.raises(APIError) as refused:
        chat_request(SharedFields(), **{"messages": [user()], field: given})
    assert refused.value.param == field
