"""How much a model thinks, as OpenAI's clients say it, and as chat templates read it."""

from __future__ import annotations

from typing import Any, Literal

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


def template_variables(effort: Effort | None) -> dict[str, Any]:
    """The variables of chat templates for an effort, by the names that models have for them."""
    if effort is None:
        return {}
    return {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}
