"""Which parts of messages the server takes, which library reads their images, and the chats that
other interfaces ask for: their limits, and images in results of tools."""

from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from mlx_lm.server import process_message_content

from paged_kv.server.completions import chat_messages
from paged_kv.server.completions.chat_messages import (
    chat_request,
    copied,
    image_files,
    inline_image_urls,
    require_no_marks,
    require_parts,
    shown_by_user,
)
from paged_kv.server.engine import paged_model_provider
from paged_kv.server.engine.paged_model_provider import refusal_of_mlx_vlm
from paged_kv.server.http.api_errors import APIError
from paged_kv.server.http.schema import SharedFields

HELLO = "data:text/plain;base64,aGVsbG8="
TEXT: dict[str, Any] = {"type": "text", "text": "a"}
NO_IMAGES = "this model takes no images"


def image(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def user(*parts: Any) -> list[Any]:
    return [{"role": "system", "content": "b"}, {"role": "user", "content": [*parts]}]


def check(*parts: Any, why_no_images: str | None = None, urls_allowed: bool = False) -> None:
    require_parts(user(*parts), why_no_images=why_no_images, urls_allowed=urls_allowed)


def test_texts_and_data_urls_are_taken() -> None:
    check(TEXT, image(HELLO), {"type": "input_image", "image_url": HELLO}, TEXT)
    check(TEXT, why_no_images=NO_IMAGES)
    with pytest.raises(APIError, match=NO_IMAGES):
        check(TEXT, image(HELLO), why_no_images=NO_IMAGES)
    check(image("https://localhost/a.png"), urls_allowed=True)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "input_audio", "input_audio": {}}, "type 'input_audio': send texts and images"),
        ({"type": "text"}, "no string as its text"),
        (image(5), "given as a data URL"),
        (image("file:///etc/hosts"), "given as a data URL"),
        (image("http://localhost/a.png"), "--allow-image-urls"),
    ],
)
def test_other_parts_are_refused(part: Any, message: str) -> None:
    with pytest.raises(APIError, match=message) as raised:
        check(TEXT, part)
    assert (raised.value.status, raised.value.param) == (400, "messages")


def test_the_files_of_images_are_decoded() -> None:
    assert image_files(user(TEXT, image(HELLO), image("data:;base64,"))) == [b"hello", b""]
    for url in ("data:image/png,abc", "data:;base64,aGVs!bG8="):
        with pytest.raises(APIError, match="base64"):
            image_files(user(image(url)))


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ('{"path": "a.', {"arguments": '{"path": "a.'}),
        ('["a"]', {"arguments": '["a"]'}),
        ("[" * 9999, {"arguments": "[" * 9999}),
        (["a"], {"arguments": ["a"]}),
        *((empty, {}) for empty in ("", "null", None)),
    ],
)
def test_arguments_that_are_no_object_are_shown_as_a_text(given: Any, shown: Any) -> None:
    """Templates go through their names. A broken call must not end a conversation."""
    call = {"function": {"name": "f", "arguments": given}}
    (message,) = copied([{"role": "assistant", "tool_calls": [call]}])
    process_message_content([message])
    assert message["tool_calls"][0]["function"]["arguments"] == shown


def test_marks_of_images_in_texts_are_refused() -> None:
    parts = [{"type": "text", "text": "<pa"}, {"type": "text", "text": "d>"}]
    for messages in (
        user({"type": "text", "text": "a <pad> b"}, image(HELLO)),
        user(*parts, image(HELLO)),
        [{"role": "user", "content": "<pad>"}],
        [{"role": "assistant", "tool_calls": [{"function": {"arguments": "<pad>"}}]}],
    ):
        require_no_marks(messages, ["<other>"])
        with pytest.raises(APIError, match="<pad>") as refused:
            require_no_marks(messages, ["<other>", "<pad>"])
        assert (refused.value.status, refused.value.param) == (400, "messages")


class Endless(BaseHTTPRequestHandler):
    """Answers without an end."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        with suppress(OSError):
            while True:
                self.wfile.write(b"a" * 1000)


@pytest.mark.parametrize(
    ("most", "seconds", "reason"), [(10_000, 240, "more bytes"), (10**12, 0.2, "have 0.2 s")]
)
def test_images_are_fetched_up_to_a_size_and_a_time(
    most: int, seconds: float, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_messages, "FETCH_S", seconds)
    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as files:
        Thread(target=files.serve_forever).start()
        try:
            with pytest.raises(APIError, match=reason):
                inline_image_urls(user(image(f"http://127.0.0.1:{files.server_port}/")), most)
        finally:
            files.shutdown()


def vision(model_type: str) -> dict[str, Any]:
    return {"model_type": model_type, "vision_config": {}}


def let_mlx_vlm_know(patches: pytest.MonkeyPatch, *known: str) -> None:
    loading = SimpleNamespace(knows=lambda config: config["model_type"] in known)
    patches.setattr(paged_model_provider, "find_spec", lambda _: object())
    patches.setattr(paged_model_provider, "loading_with_mlx_vlm", lambda: loading)


def test_mlx_vlm_loads_what_mlx_lm_would_load_without_its_images(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let_mlx_vlm_know(monkeypatch, "qwen2_vl", "idefics3", "muse_spark", "gemma3")
    assert refusal_of_mlx_vlm(vision("qwen2_vl"), {}) is None
    assert refusal_of_mlx_vlm({"model_type": "idefics3"}, {"--adapter-path": None}) is None
    refused: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"model_type": "llama"}, {}, NO_IMAGES),
        (vision("muse_spark"), {}, NO_IMAGES),
        (vision("llama"), {}, "'llama'"),
        (vision("gemma3"), {"--draft-model": "d"}, "--draft-model"),
        (vision("gemma3"), {"--adapter-path": "a"}, "--adapter-path"),
    ]
    for config, options, reason in refused:
        assert reason in (refusal_of_mlx_vlm(config, options) or "")
    # Of what mlx-lm does not know, nothing is left.
    for unknown, why in (("idefics3", "--draft-model does not work"), ("no", "neither mlx-lm nor")):
        with pytest.raises(ValueError, match=why):
            refusal_of_mlx_vlm({"model_type": unknown}, {"--draft-model": "ngram"})


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def tool(*content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "1", "content": list(content)}


def users(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def test_they_come_before_what_is_said_then() -> None:
    answer = {"role": "assistant", "content": "I see."}
    first = [users(text("Look."), image("0")), tool(image("1"))]
    assert shown_by_user([*first, users(text("Well?"), image("2"))]) == [
        *(first[0], tool(), users(image("1"), text("Well?"), image("2"))),
    ]
    said = {"role": "user", "content": "Well?"}
    assert shown_by_user([tool(image("1")), said]) == [
        tool(),
        users(image("1"), text("Well?")),
    ]
    assert shown_by_user([tool(image("1")), answer, tool(image("1"))]) == [
        *(tool(), users(image("1")), answer, tool(), users(image("1"))),
    ]


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("messages", []),
        ("messages", [users()] * 2049),
        ("messages", [users(*[text("a")] * 2049)]),
        ("messages", [{**users(), "tool_calls": [{}] * 1025}]),
        ("tools", [{}] * 1025),
    ],
)
def test_what_items_become_has_limits(field: str, given: Any) -> None:
    with pytest.raises(APIError) as refused:
        chat_request(SharedFields(), **{"messages": [users()], field: given})
    assert refused.value.param == field
