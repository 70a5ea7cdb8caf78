"""What to install for an extra depends on where the package came from."""

from typing import Any

import pytest

from paged_kv.extras import command_from

COMMIT = "0123abc"


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ({}, "pip install 'paged-kv[cpu]'"),
        (
            {"url": "file:///home/me/paged%20kv", "dir_info": {"editable": True}},
            "pip install -e '/home/me/paged kv[cpu]'",
        ),
        (
            {"url": "file:///home/me/paged_kv", "dir_info": {}},
            "pip install '/home/me/paged_kv[cpu]'",
        ),
        (
            {"url": "file:///tmp/paged_kv-1-py3-none-any.whl", "archive_info": {}},
            "pip install 'paged-kv[cpu] @ file:///tmp/paged_kv-1-py3-none-any.whl'",
        ),
        (
            {"url": "https://host/a.git", "vcs_info": {"vcs": "git", "commit_id": COMMIT}},
            f"pip install 'paged-kv[cpu] @ git+https://host/a.git@{COMMIT}'",
        ),
    ],
    ids=["index", "editable checkout", "checkout", "wheel", "repository"],
)
def test_the_command_works_for_how_the_package_was_installed(
    origin: dict[str, Any], command: str
) -> None:
    assert command_from(origin, "cpu") == command
