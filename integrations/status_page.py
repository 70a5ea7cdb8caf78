"""What a server tells about its pools: `/kv`, a page for people that follows them by itself,
`/kv/data`, what that page shows, and `/metrics`, for Prometheus.

No other site may read them: unlike answers to requests they allow no foreign origin, and the page
loads nothing but its data.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.resources import files

from paged_kv.extras import extra_module
from paged_kv.open_pools import open_pools
from paged_kv.process_view import ProcessView, view_process

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
_POLICY += "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'"


@dataclass(frozen=True)
class Answer:
    """What is sent for one path.

    Attributes:
        content: the body.
        content_type: what it is.
        status: of HTTP.
    """

    content: bytes
    content_type: str
    status: int = 200

    @property
    def headers(self) -> dict[str, str]:
        """All headers."""
        return {
            "Content-Type": self.content_type,
            "Content-Length": str(len(self.content)),
            "Cache-Control": "no-store",
            "Content-Security-Policy": _POLICY,
            "X-Content-Type-Options": "nosniff",
        }


def answer_for(path: str) -> Answer | None:
    """What to answer for one of the paths of this module; None if it is none of them."""
    makers: dict[str, Callable[[], Answer]] = {"/kv": page, "/kv/data": data, "/metrics": metrics}
    maker = makers.get(path.partition("?")[0])
    return None if maker is None else maker()


def page() -> Answer:
    """The page."""
    html = files("paged_kv.integrations").joinpath("status_page.html").read_bytes()
    return Answer(html, "text/html; charset=utf-8")


def data() -> Answer:
    """What the pools of this process hold."""
    return Answer(json.dumps(_view().as_dict()).encode(), "application/json")


def metrics() -> Answer:
    """The same for Prometheus, or how to install what that needs."""
    try:
        module = extra_module("paged_kv.prometheus_metrics", "metrics")
    except ValueError as error:
        return Answer(f"{error}\n".encode(), "text/plain; charset=utf-8", 501)
    content: bytes = module.metrics_text(_view())
    return Answer(content, "text/plain; version=0.0.4; charset=utf-8")


def _view() -> ProcessView:
    # A command line may hold what is not for everybody who can reach the port.
    return replace(view_process(open_pools()), command="")
