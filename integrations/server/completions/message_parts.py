"""Checks the parts of chat messages, and takes the images out of them."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Sequence
from typing import Any

from mlx_lm import server

from paged_kv.integrations.server.http.api_errors import APIError, wrong_value

_KINDS = ("text", "image_url", "input_image", "image")


def require_parts(
    messages: Sequence[Any], *, why_no_images: str | None, urls_allowed: bool
) -> None:
    """Check that each part is a text, or an image that this server may read.

    Raises:
        APIError: 400, one is neither.
    """
    for part in _parts(messages):
        kind = part.get("type")
        if kind not in _KINDS:
            raise _wrong(f"a part of a message is of type {kind!r}: send texts and images only")
        if kind == "text":
            if not isinstance(part.get("text"), str):
                raise _wrong("a part of type 'text' has no string as its text")
            continue
        if why_no_images is not None:
            raise _wrong(why_no_images)
        url = server._image_url(part)
        if not isinstance(url, str) or not url.startswith(("data:", "http://", "https://")):
            raise _wrong("an image must be given as a data URL")
        if not (url.startswith("data:") or urls_allowed):
            raise _wrong(
                "this server fetches no images: send a data URL, or start it with "
                "--allow-image-urls"
            )


def image_files(messages: Sequence[Any]) -> list[bytes]:
    """The files in the data URLs of all image parts, in order.

    Raises:
        APIError: 400, one is not base64.
    """
    parts = server._image_parts(list(messages))
    return [_decoded(str(server._image_url(part))) for part in parts]


def _parts(messages: Sequence[Any]) -> Iterator[dict[str, Any]]:
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            yield from content


def _decoded(url: str) -> bytes:
    head, _, content = url.partition(",")
    if not head.endswith(";base64"):
        raise _wrong("the data URL of an image must be base64: data:image/png;base64,...")
    try:
        return base64.b64decode(content, validate=True)
    except binascii.Error as error:
        raise _wrong(f"the data URL of an image is not base64: {error}") from error


def _wrong(message: str) -> APIError:
    return wrong_value(message, "messages")
