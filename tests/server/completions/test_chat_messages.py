"""Images in results of tools become the user's, in their order."""

from typing import Any

from paged_kv.server.completions.chat_messages import shown_by_user


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
