"""What a server tells about its pools and its requests: `/kv`, a page for people that follows them
by itself, `/kv/data`, what that page shows, and `/metrics`, for Prometheus.

No other site may read them: unlike answers to requests they allow no foreign origin, they are not
served under names of other machines, and the page loads nothing but its data. With API keys they
need one, as they tell of all clients' requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from importlib.resources import files
from time import monotonic
from types import ModuleType
from typing import Any

from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from paged_kv.extras import extra_module
from paged_kv.monitor.processes import ProcessView
from paged_kv.monitor.publisher import view_process
from paged_kv.pool.page_pool import open_pools
from paged_kv.pool.stats import COLUMNS
from paged_kv.server.completions.service import Service
from paged_kv.server.engine.jobs import Job

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
_POLICY += "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'"
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
}

# The page counts more requests than it lists.
MOST_LISTED = 50


def page() -> Response:
    html = files("paged_kv.server").joinpath("status_page.html").read_text("utf-8")
    return HTMLResponse(html, headers=HEADERS)


def _view() -> ProcessView:
    # A command line may hold secrets, and anybody who can reach the port reads this.
    return replace(view_process(open_pools.items()), command="")


def data(service: Service) -> Response:
    """The pools of this process, and the requests of the server."""
    shown = {"requests": requests(service), "columns": columns()}
    return JSONResponse(_view().as_dict() | shown, headers=HEADERS)


def metrics(service: Service) -> Response:
    """The metrics for Prometheus, or the extra to install for them."""
    try:
        module = metrics_module()
    except ValueError as error:
        return PlainTextResponse(f"{error}\n", 501, HEADERS)
    content: bytes = module.metrics_text(service, _view())
    return Response(content, media_type="text/plain; version=0.0.4; charset=utf-8", headers=HEADERS)


def metrics_module() -> ModuleType:
    """The module that makes Prometheus's text; raises ValueError without its extra."""
    return extra_module("paged_kv.server.prometheus", "metrics")


def columns() -> list[dict[str, str]]:
    """The columns of statistics, from which the page makes its tables."""
    names = ("name", "label", "meaning", "unit")
    return [{name: getattr(each, name) for name in names} for each in COLUMNS if each.label]


def requests(service: Service) -> dict[str, Any]:
    """Waiting and running requests, the oldest first, and the counts of all."""
    jobs, counted = list(service.thread.jobs.values()), service.metrics
    hit = service.short_hits.last
    return {
        "waiting": choices_in(jobs, "waiting"),
        "running": choices_in(jobs, "running"),
        "refused": counted.refused,
        "finished": dict(counted.finished),
        "prompt_tokens": counted.prompt_tokens,
        "cached_tokens": counted.cached_tokens,
        "generation_tokens": counted.generation_tokens,
        "prepared": {
            "tokens": counted.prepared_tokens,
            "found": counted.prepared_found,
            "unused": counted.prepared_unused,
        },
        "short_hit": None if hit is None else asdict(hit),
        "listed": [
            [
                job.request_id[:8],
                job.stage,
                0 if job.prompt is None else len(job.prompt.tokens),
                job.cached_tokens,
                job.generated_tokens,
                round(monotonic() - job.since, 1),
            ]
            for job in jobs[:MOST_LISTED]
        ],
    }


def choices_in(jobs: Iterable[Job], stage: str) -> int:
    """How many choices of jobs are in a stage; each takes the place of a sequence."""
    return sum(job.choices for job in jobs if job.stage == stage)
