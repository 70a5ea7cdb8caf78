"""Redis behind TLS, with certificates that openssl makes."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ports import free_port
from tests.support.running_server import wait_until
from tests.support.stored_prompts import TEXT, filled, remote_factory, shallow_model, store_of
from tests.support.tier_servers import SECRET, is_listening, redis_server

ISSUED = ("-CA", "{0}/ca.pem", "-CAkey", "{0}/ca.key", "-addext", "basicConstraints=CA:FALSE")


def certify(folder: Path, name: str, *options: str) -> None:
    """Write the certificate `name`.pem and its key."""
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.pem")]
    command += ["-subj", f"/CN={name}", *[option.format(folder) for option in options]]
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of an authority, of a server and a client that it knows, and of another one."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl")
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("ca", "other"):
        certify(folder, name, "-addext", "keyUsage=critical,keyCertSign")
    certify(folder, "server", *ISSUED, "-addext", "subjectAltName=IP:127.0.0.1")
    certify(folder, "client", *ISSUED)
    (folder / "secret").write_bytes(SECRET)
    return folder


@pytest.fixture(scope="module")
def port(folder: Path) -> Iterator[int]:
    """Where Redis takes clients that have a certificate."""
    port = free_port()
    files = {"cert": "server.pem", "key": "server.key", "ca-cert": "ca.pem"}
    options = [(f"--tls-{name}-file", str(folder / file)) for name, file in files.items()]
    with redis_server(folder, "--tls-port", str(port), *sum(options, ())):
        wait_until(lambda: is_listening(port))
        yield port


KNOWN = "ca={0}/ca.pem&cert={0}/client.pem&key={0}/client.key"
UNTRUSTED = {"SSLCertVerificationError"}
# Versions of TLS and of servers differ in this.
TURNED_AWAY = {"SSLError", "SSLEOFError", "ConnectionError"}


@pytest.mark.slow
def test_pages_travel_over_tls_between_those_who_know_each_other(folder: Path, port: int) -> None:
    model, secret = shallow_model("qwen3"), folder / "secret"
    address = f"rediss://127.0.0.1:{port}?{KNOWN.format(folder)}"
    filled(model, secret, address, TEXT[:600])
    factory = remote_factory(model, secret, address)
    assert factory.fetch_cache(TEXT[:600])[1] == 512
    assert store_of(factory).stats().errors == {}
    factory.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("address", "faults"),
    [
        ("rediss://127.0.0.1:{1}?cert={0}/client.pem&key={0}/client.key", UNTRUSTED),
        ("rediss://127.0.0.1:{1}?" + KNOWN.replace("/ca", "/other"), UNTRUSTED),
        ("rediss://localhost:{1}?" + KNOWN, UNTRUSTED),
        ("rediss://127.0.0.1:{1}?ca={0}/ca.pem", TURNED_AWAY),
        ("rediss://127.0.0.1:{1}?" + KNOWN.replace("/client", "/other"), TURNED_AWAY),
        ("redis://127.0.0.1:{1}", TURNED_AWAY),
    ],
)
def test_others_find_nothing_and_are_told_why(
    folder: Path, port: int, address: str, faults: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    model, secret = shallow_model("qwen3"), folder / "secret"
    factory = remote_factory(model, secret, address.format(folder, port))
    assert factory.fetch_cache(TEXT[:600])[1] == 0
    (fault,) = store_of(factory).stats().errors
    assert fault in faults
    assert f"failed with {fault}" in caplog.text
    factory.close()
