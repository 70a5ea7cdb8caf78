"""The options of a store, and the texts that name its tiers.

    ~/pages                                              a folder
    redis://host:6379/0                                  Redis or Valkey; rediss:// with TLS
    redis://user@host?password=env:NAME                  with the password of a variable, or a file
    rediss://host?ca=FILE                                with the certificate of one's own authority
    rediss://host?cert=FILE&key=FILE                     with a certificate that names this client
    s3://bucket/prefix                                   S3, with credentials of variables AWS_...
    s3://bucket?endpoint=http://host:9000&region=here    what speaks its protocol
    s3://bucket?credentials=FILE                         two lines: the key's id, and the key

A text with a password in it is refused, as other users can read command lines.
"""

from __future__ import annotations

import os
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from paged_kv.checks import cache_folder, file_path, parse_size, size_in_bytes, whole_number
from paged_kv.options import Options, option, path, positive

DEFAULT_STORE_BYTES = "50GB"
MIN_BYTES = 8 << 20
_ENVIRONMENT = "env:"
_REDIS = ("redis", "rediss")
_CERTIFICATES = ("ca", "cert", "key")


def default_folder() -> Path:
    """The default folder of pages."""
    return cache_folder() / "pages"


def store_size(text: str) -> int:
    """The bytes that a page store may take."""
    nbytes = parse_size(text)
    if nbytes < MIN_BYTES:
        raise ArgumentTypeError(
            f"{text!r} is too small for pages: give at least {MIN_BYTES:,} bytes"
        )
    return nbytes


def tier(text: str) -> str | Path:
    """A folder, or the address of a server."""
    if "://" not in text:
        return path(text)
    try:
        parse_address(text)
    except (OSError, ValueError) as error:
        raise ArgumentTypeError(str(error)) from None
    return text


@dataclass(frozen=True)
class StoreOptions(Options):
    """How a factory uses its store: what it writes, and what it trusts.

    Attributes:
        after: write a prefix to the store once N prompts have begun with it: with 2, what comes
            only once does not wear the disk. Counts outlive the process.
        at_once: write a prefix of at least so many tokens when it is first seen.
        daily_bytes: the most to write to the folder in a day (UTC), such as 20GB, by all processes
            that share it; then it is only read.
        secret: a file of at least 32 bytes, the same on all machines, with which entries on servers
            are verified.
        unauthenticated: take servers without a secret: whoever can write there can change answers.
    """

    after: int = option(
        1, parse=positive, check=partial(whole_number, "after", least=1), needs="store", metavar="N"
    )
    # No number is worth its bytes in all of the replayed loads of benches/store_writes.py.
    at_once: int | None = option(
        None,
        parse=positive,
        check=partial(whole_number, "at_once", least=1),
        needs="store",
        usual="no such length",
        metavar="TOKENS",
    )
    daily_bytes: float | str | None = option(
        None,
        parse=parse_size,
        check=partial(size_in_bytes, "daily_bytes"),
        needs="store",
        usual="no limit",
        metavar="SIZE",
    )
    secret: str | os.PathLike[str] | None = option(
        None, parse=path, check=partial(file_path, "secret"), needs="store", metavar="FILE"
    )
    unauthenticated: bool = option(False, needs="store")

    def is_due(self, lookups: int, num_tokens: int) -> bool:
        """Whether to write blocks of a prefix of `num_tokens` tokens, looked up so often."""
        is_long = self.at_once is not None and num_tokens >= self.at_once
        return is_long or lookups >= self.after


WRITE_EVERYTHING = StoreOptions()


@dataclass(frozen=True)
class RedisAddress:
    """A server that speaks the protocol of Redis."""

    host: str
    port: int = 6379
    db: int = 0
    tls: bool = False
    user: str | None = None
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    password: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        scheme = "rediss" if self.tls else "redis"
        return f"{scheme}://{self.host}:{self.port}/{self.db}"


@dataclass(frozen=True)
class S3Address:
    """A bucket of S3, or of a server that speaks its protocol."""

    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str | None = None
    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")


TierPlace = str | os.PathLike[str]
"""A folder, or the address of a server."""

RemoteAddress = RedisAddress | S3Address
Address = Path | RemoteAddress


def parse_address(text: str) -> RemoteAddress:
    """The server that a text names. Passwords are read here.

    Raises:
        ValueError: the text is no address of one; the message does not repeat passwords.
        OSError: a file of a password cannot be read, or one of a certificate is not there.
    """
    scheme = text.partition("://")[0]
    try:
        url = urlsplit(text)
        port = url.port
    except ValueError:
        raise ValueError(f"the address of a store, {scheme}://..., cannot be read") from None
    if scheme not in (*_REDIS, "s3"):
        raise ValueError(
            f"a store cannot be at {scheme}://...: name a folder, redis://, rediss:// or s3://"
        )
    if not url.hostname:
        raise ValueError(f"the address of a store, {scheme}://..., names no host or bucket")
    if url.password is not None:
        raise ValueError(
            f"the address of a store, {scheme}://..., has a password in it, which other users of "
            "this machine can read: give it as ?password=env:NAME, or ?password=FILE"
        )
    return _redis(url, port) if scheme in _REDIS else _s3(url)


def store_addresses(store: TierPlace | Sequence[TierPlace]) -> list[Address]:
    """The tiers that the argument `store` names, quickest first.

    Raises:
        TypeError: it is neither a path nor a list or tuple of paths.
        ValueError: it names no tier, several folders, or something that is no address.
        OSError: the file of a password cannot be read.
    """
    places = list(store) if isinstance(store, list | tuple) else [store]
    if not places:
        raise ValueError("store must name a folder or a server, got an empty list")
    addresses = [
        parse_address(each) if isinstance(each, str) and "://" in each else file_path("store", each)
        for each in places
    ]
    if sum(isinstance(each, Path) for each in addresses) > 1:
        raise ValueError("store names several folders: one is enough, and servers may follow it")
    return addresses


def _redis(url: SplitResult, port: int | None) -> RedisAddress:
    tls = url.scheme == "rediss"
    options = _options(url, ("password", *(_CERTIFICATES if tls else ())))
    db = url.path.strip("/") or "0"
    if not db.isdecimal():
        raise ValueError(f"{url.scheme}://{url.hostname}: the database must be a number, as in /0")
    return RedisAddress(
        host=str(url.hostname),
        port=port or 6379,
        db=int(db),
        tls=tls,
        user=unquote(url.username) if url.username else None,
        **{name: _file(options[name]) for name in _CERTIFICATES if name in options},
        password=_password(options["password"]) if "password" in options else None,
    )


def _s3(url: SplitResult) -> S3Address:
    options = _options(url, ("endpoint", "region", "credentials"))
    keys: list[str | None] = [None, None]
    if "credentials" in options:
        lines = Path(options["credentials"]).expanduser().read_text("utf-8").split()
        if len(lines) != 2:
            raise ValueError(
                f"{options['credentials']} must have two lines: the id of an access key, and the "
                "key"
            )
        keys = [*lines]
    bucket, prefix = url.netloc.rpartition("@")[2], url.path.strip("/")
    return S3Address(bucket, prefix, options.get("endpoint"), options.get("region"), *keys)


def _options(url: SplitResult, known: tuple[str, ...]) -> Mapping[str, str]:
    options = dict(parse_qsl(url.query))
    if unknown := sorted(options.keys() - set(known)):
        raise ValueError(
            f"{url.scheme}://{url.hostname} has the option {unknown[0]}: only {', '.join(known)} "
            "are known"
        )
    return options


def _file(path: str) -> Path:
    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {path}, which the address of a store names")
    return file


def _password(source: str) -> str:
    if not source.startswith(_ENVIRONMENT):
        try:
            return Path(source).expanduser().read_text("utf-8").strip()
        except (OSError, ValueError):
            # Who has written the password itself here must not find it in a log.
            raise ValueError(
                "the file of a store's password cannot be read: write password=env:NAME, or "
                "password=FILE"
            ) from None
    name = source.removeprefix(_ENVIRONMENT)
    if name not in os.environ:
        raise ValueError(f"the variable {name}, which should hold a store's password, is not set")
    return os.environ[name]
