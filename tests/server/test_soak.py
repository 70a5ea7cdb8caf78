"""Mixed traffic for a server: no text is wrong, /metrics counts what the clients count, and at the
end it holds what it held after the first 100 requests.

PAGED_KV_SOAK_REQUESTS sets the requests of the longest one, 300 by default. `benches.server_soak`
sends 2,000.
"""

import os
import sys
from pathlib import Path

import pytest

from tests.support.soak_questions import KINDS, data_url, questions
from tests.support.soaking import BUSY, BUSY_LLAMA, CALM, LATE_THREADS, STORE_BYTES, Soaked, soaked
from tests.support.vision_folder import write_model_and_pictures

REQUESTS = int(os.environ.get("PAGED_KV_SOAK_REQUESTS", "300"))
# Pages become resident when they are first written, up to the budget of 38 MB, which the first 100
# requests may not fill.
GROWTH_BYTES = 64 << 20
# Connections that are just being closed, and the index of a store that a late thread has opened.
LATE_FILES = 4

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(600 + 3 * REQUESTS),
    pytest.mark.skipif(sys.platform != "linux", reason="reads the meters of /proc"),
]


def assert_sound(found: Soaked) -> None:
    """Check all that holds after any soak."""
    assert found.truth.wrong == []
    assert found.truth.differences(found.counted) == []
    assert len(found.truth.behaviours) == 9
    assert found.status == 0
    assert [line for line in found.log if "ERROR" in line or "Traceback" in line] == []
    assert found.last["resident_bytes"] - found.first["resident_bytes"] < GROWTH_BYTES
    assert found.last["files"] <= found.first["files"] + LATE_FILES
    assert found.last["threads"] <= found.first["threads"] + LATE_THREADS
    assert found.counted["kv_active_bytes"] == 0
    assert found.stored_bytes <= STORE_BYTES


def test_a_server_holds_no_more_after_a_soak_than_after_its_beginning(tmp_path: Path) -> None:
    found = soaked(CALM, BUSY_LLAMA, tmp_path, REQUESTS, questions({}))
    assert_sound(found)
    assert set(found.truth.kinds) == set(KINDS)
    assert found.counted["num_preemptions_total"] > 0
    assert found.counted["store_written_bytes_total"] > STORE_BYTES
    assert found.counted["spec_decode_num_accepted_tokens_total"] > 0


def test_what_is_reserved_is_not_preempted(tmp_path: Path) -> None:
    options = [*BUSY_LLAMA, "--admission", "reserve"]
    found = soaked(CALM, options, tmp_path, max(110, REQUESTS // 4), questions({}))
    assert_sound(found)
    assert found.counted["num_preemptions_total"] == 0


def test_images_among_texts(tmp_path: Path) -> None:
    pytest.importorskip("mlx_vlm", reason="needs the extra vlm")
    folder = write_model_and_pictures(tmp_path)
    model = ["--model", str(folder / "model")]
    pictures = {name: data_url(folder / f"{name}.png") for name in ("red", "blue")}
    budget = ["--max-kv-bytes", str(24 * 256 * 2 * 2 * 2 * 16 * 4)]
    found = soaked(
        [*CALM, *model],
        [*BUSY, *model, *budget],
        tmp_path / "store",
        max(110, REQUESTS // 4),
        questions(pictures),
    )
    assert_sound(found)
    assert found.truth.kinds["images"] > 0
