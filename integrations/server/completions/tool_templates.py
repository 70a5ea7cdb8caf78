"""Refuses tools that a model would never see, because its chat template has no place for them."""

from __future__ import annotations

import argparse
from typing import Any

from transformers import PreTrainedTokenizerBase

from paged_kv.integrations.server.http.api_errors import wrong_value
from paged_kv.integrations.server.http.schema import ChatBody
from paged_kv.kernels.pages.warn_once import warn_once


def require_tools_shown(tokenizer: Any, body: ChatBody, options: argparse.Namespace) -> None:
    """Check that a model's prompt names the tools of a request.

    Args:
        tokenizer: mlx-lm's, of the model.
        body: of the request.
        options: of the server; with `drop_tools` the answer is made without the tools.

    Raises:
        APIError: 400, the model's chat template has no tools.
    """
    if not body.tools or body.tool_choice == "none" or shows_tools(tokenizer):
        return
    if options.drop_tools:
        warn_once("tools of requests are dropped: the chat template of the model has none")
        return
    raise wrong_value(
        "tools: the chat template of this model has no tools, so the model would not see them: "
        "leave them out, take a model that was trained to call tools, or start the server with "
        "--drop-tools to answer without them",
        "tools",
    )


def shows_tools(tokenizer: Any) -> bool:
    """Whether prompts that a tokenizer of mlx-lm makes of messages can name tools."""
    if tokenizer.has_tool_calling or tokenizer._chat_template is not None:
        return True
    inner = tokenizer._tokenizer
    render = PreTrainedTokenizerBase.apply_chat_template
    if getattr(type(inner), "apply_chat_template", render) is not render:
        return True
    template = inner.chat_template
    texts = template.values() if isinstance(template, dict) else [template or ""]
    return any("tools" in text for text in texts)
