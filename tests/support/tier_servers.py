"""Real servers for tiers, on loopback: Redis or Valkey, and a server of S3's protocol."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.ports import free_port
from tests.support.running_server import wait_until

SECRET = b"0123456789abcdef" * 2
REDIS_SERVERS = ("valkey-server", "redis-server")


def is_listening(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


class RedisServer:
    """A server that a test may stop, kill and start again at the same port."""

    def __init__(self, folder: Path, *options: str) -> None:
        names = [name for name in map(shutil.which, REDIS_SERVERS) if name]
        if not names:
            pytest.skip(f"there is no {' or '.join(REDIS_SERVERS)}")
        pytest.importorskip("redis")
        self.port = free_port()
        self._command = [names[0], "--port", str(self.port), "--bind", "127.0.0.1"]
        self._command += ["--save", "", "--appendonly", "no", "--dir", str(folder), *options]
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def address(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        wait_until(lambda: is_listening(self.port))

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """The server takes connections and answers nothing."""
        self.stop()
        try:
            yield
        finally:
            self.resume()

    def stop(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def client(self) -> Any:
        import redis

        return redis.Redis(port=self.port)


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[RedisServer]:
    server = RedisServer(folder, *options)
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def s3_server(bucket: str) -> Iterator[str]:
    """The address of a bucket of moto's server, with credentials that it takes."""
    pytest.importorskip("moto", reason="there is no server of S3's protocol: moto is missing")
    pytest.importorskip("obstore")
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: is_listening(port))
        endpoint = f"http://127.0.0.1:{port}"
        import boto3  # of moto

        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
        client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **keys)
        client.create_bucket(Bucket=bucket)
        yield f"s3://{bucket}/pages?endpoint={endpoint}&region=us-east-1"
    finally:
        process.kill()
        process.wait()


@contextmanager
def s3_credentials() -> Iterator[None]:
    names = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_bytes(SECRET)
    return file


@pytest.fixture(scope="module")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
def redis(shared_redis: RedisServer) -> RedisServer:
    """The server that the tests of a module share, empty."""
    if shared_redis.process is None or shared_redis.process.poll() is not None:
        shared_redis.start()
    shared_redis.client().flushall()
    return shared_redis
