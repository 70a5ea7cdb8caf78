"""Decodes compressed bodies of requests, and makes no more bytes of them than are wanted."""

from __future__ import annotations

import sys
import zlib
from importlib import import_module
from typing import Any

from paged_kv.server.http.api_errors import APIError, shortened, wrong_value

ENCODINGS = "gzip, deflate, zstd"

# zlib finds out by the first bytes which of its two containers it is.
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS
# The window that a sender may ask for is memory of this process: 8 MB, as RFC 9659 says.
_WINDOW_LOG = 23
_ZSTD = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"


class BodyDecoder:
    """Decodes one body, part by part.

    Args:
        encoding: the request's `Content-Encoding`; empty for a body that is not compressed.

    Raises:
        APIError: 415, the server does not know this encoding.
    """

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding.strip().lower()
        self._decoder = _decoder(self._encoding)

    def decode(self, part: bytes, most: int) -> bytes:
        """What the next part adds, up to `most` bytes. Who gets so many asks for no more.

        Raises:
            APIError: 400, it is not in this encoding.
        """
        if self._decoder is None or not part:
            return part[:most]
        if self._decoder.eof:
            raise self._wrong("something follows its end")
        try:
            decoded: bytes = self._decoder.decompress(part, most)
        except Exception as error:  # zlib and zstd have one of their own each
            raise self._wrong(str(error)) from None
        return decoded

    def require_end(self) -> None:
        """Raise APIError 400 unless the body has ended where its encoding does."""
        if self._decoder is not None and not self._decoder.eof:
            raise self._wrong("its end is missing")
        if self._decoder is not None and self._decoder.unused_data:
            raise self._wrong("something follows its end")

    def _wrong(self, why: str) -> APIError:
        return wrong_value(f"the body is not in {self._encoding}, as Content-Encoding says: {why}")


def _decoder(encoding: str) -> Any:
    """What decodes an encoding; None for a body as it is."""
    if encoding in ("", "identity"):
        return None
    if encoding in ("gzip", "deflate"):
        return zlib.decompressobj(_GZIP_OR_ZLIB)
    if encoding != "zstd":
        raise _unsupported(f"Content-Encoding {shortened(encoding)}: send one of {ENCODINGS}")
    try:
        zstd = import_module(_ZSTD)
    except ImportError:
        extra = "install it with the extra zstd: pip install 'paged-kv[zstd]'"
        raise _unsupported(f"this server reads no zstd: send gzip, or {extra}") from None
    options = {zstd.DecompressionParameter.window_log_max: _WINDOW_LOG}
    return zstd.ZstdDecompressor(options=options)


def _unsupported(message: str) -> APIError:
    code, headers = "unsupported_encoding", {"Accept-Encoding": ENCODINGS}
    return APIError(415, message, code=code, headers=headers)
