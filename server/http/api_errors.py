"""Errors of the HTTP API, in the form that OpenAI's clients read:

{"error": {"message": "...", "type": "invalid_request_error", "param": "top_k", "code": null}}
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60
_short.maxdict = _short.maxlist = _short.maxlevel = 3


class APIError(Exception):
    """A request that is answered with an error. The `message` says what was asked, what there was,
    and what to change; `param` is the field of the body that is wrong, and `code` names the error
    for programs. The `status` is HTTP's, and the `headers` are of the answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def __str__(self) -> str:
        return self.message

    def as_dict(self) -> dict[str, Any]:
        """The body of the answer; from status 500 on its type is "server_error"."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        return JSONResponse(self.as_dict(), self.status, self.headers)


def wrong_value(message: str, param: str | None = None) -> APIError:
    """400: something in the request can never be served."""
    return APIError(400, message, param=param, code="invalid_value")


def busy(message: str, retry_after_s: int = 1) -> APIError:
    """503: the same request may be served later."""
    return APIError(503, message, code="busy", headers={"Retry-After": str(retry_after_s)})


def no_memory() -> APIError:
    """503: MLX cannot allocate what the next token of a request needs. The log says why."""
    return busy("the server has no memory to compute this: ask again later, or for fewer tokens")


def from_validation(error: ValidationError, body: Mapping[str, Any]) -> APIError:
    """400 that names the first field of a body that does not fit its schema.

    Where a field may be several things, pydantic tells what each of them lacks. What went furthest
    into the body is the one that was meant.
    """
    faults = error.errors(include_url=False)
    places = [tuple(_place(each, body)) for each in faults]
    field = places[0]
    # Of as far faults, those count where something of the kind was sent.
    closeness = [
        (place[: len(field)] == field, len(place), not fault["type"].endswith("_type"))
        for place, fault in zip(places, faults, strict=True)
    ]
    nearest = closeness.index(max(closeness))
    place, fault = places[nearest], faults[nearest]
    alike = [
        _what(each)
        for each, at, close in zip(faults, places, closeness, strict=True)
        if (at, close) == (place, closeness[nearest])
    ]
    first, *others = dict.fromkeys(alike)
    what = " or ".join([first, *(each.removeprefix("Input should be ") for each in others)])
    got = "" if fault["type"] == "missing" else f", got {shortened(fault['input'])}"
    param = ".".join(map(str, place)) or None
    return wrong_value(f"{param or 'the body'}: {what}{got}", param)


def _place(fault: ErrorDetails, value: Any) -> Iterator[int | str]:
    """The parts of an error's place that are in the body. Pydantic adds the names of what a field
    may be."""
    for part, following in pairwise([*fault["loc"], None]):
        is_last = following is None
        if isinstance(value, dict):
            is_known = part in value
            # The "text" in {"type": "text", "text": 5} is the name of a block, and of a field.
            is_name = is_known and part in (value.get("type"), value.get("role")) and not is_last
            if is_name and (following in value or not isinstance(value[part], dict | list)):
                continue
        else:
            is_known = isinstance(value, list) and isinstance(part, int)
        if is_known:
            value = value[part]
        if part is not None and (is_known or (is_last and fault["type"] == "missing")):
            yield part


def _what(error: ErrorDetails) -> str:
    about = error.get("ctx", {})
    name = "role" if "role" in about.get("discriminator", "") else "type"
    match error["type"]:
        case "union_tag_invalid":
            return f"the {name} {about['tag']!r} is none of {about['expected_tags']}"
        case "union_tag_not_found":
            return f"an object with a {name} is needed"
    return error["msg"].removeprefix("Value error, ")


def shortened(value: Any) -> str:
    """A client's value as an error quotes it."""
    return _short.repr(value)


def as_api_error(error: Exception) -> APIError:
    """What a client is told of an exception that left a route."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, HTTPException):
        codes = {404: "not_found", 405: "method_not_allowed"}
        code = codes.get(error.status_code)
        return APIError(error.status_code, error.detail, code=code, headers=error.headers)
    # The exception goes to the log only: its message may hold private data.
    return APIError(500, "the server failed to answer: see its log", code="internal")
