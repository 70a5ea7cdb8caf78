"""Moves images out of the results of tools: chat templates show those of users only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Object = dict[str, Any]


def shown_by_user(messages: Iterable[Object]) -> list[Object]:
    """Chat messages whose images are all the user's: those of a run of tools' results come behind
    it, before what the user says then."""
    shown: list[Object] = []
    images: list[Object] = []
    for message in messages:
        if message["role"] != "tool":
            message, images = _with_first(shown, images, message), []
        elif isinstance(message["content"], list):
            parts = message["content"]
            images += [part for part in parts if part["type"] == "image_url"]
            message = {**message, "content": [part for part in parts if part not in images]}
        shown.append(message)
    if images:
        shown.append({"role": "user", "content": images})
    return shown


def _with_first(shown: list[Object], images: list[Object], message: Object) -> Object:
    """A message behind some images: its own if it is the user's, or else those of one before."""
    if not images:
        return message
    if message["role"] != "user":
        shown.append({"role": "user", "content": images})
        return message
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {**message, "content": [*images, *parts]}
