"""/metrics counts requests as requests and choices as choices."""

from typing import Any

import pytest
from openai import BadRequestError, InternalServerError

from paged_kv.server.http.api_errors import busy
from tests.support.running_server import paged_server, wait_until
from tests.support.server_process import metrics

ASKED: dict[str, Any] = {"model": "default_model", "prompt": ["a", "b", "c"], "n": 2}
GO_ON: Any = {"0": -1000}


def test_requests_and_choices_are_told_apart(tiny: str) -> None:
    options = ["--model", tiny, "--max-kv-bytes", "64MB"]
    with paged_server(*options) as running, running.client() as client:
        client.completions.create(**ASKED, max_tokens=2, logit_bias=GO_ON)
        for wrong in ({"best_of": 5}, {"max_tokens": -2}, {"prompt": [99999]}):
            with pytest.raises(BadRequestError):
                client.completions.create(**{**ASKED, **wrong})
        stream = client.completions.create(**ASKED, max_tokens=4000, stream=True, logit_bias=GO_ON)
        next(stream)
        stream.close()
        wait_until(lambda: not running.service.gate.inside)
        running.service.thread.refuse(busy("no more"))
        with pytest.raises(InternalServerError):
            client.completions.create(**ASKED)
        running.wait_until_idle()
        counted = metrics(running.port)
    assert counted["http_requests_total.200"] == 1
    assert counted["http_requests_total.400"] == 3
    assert counted["http_requests_total.503"] == counted["num_requests_refused_total"] == 1
    assert counted["request_success_total.length"] == 6
    assert counted["request_success_total.abort"] == 6
