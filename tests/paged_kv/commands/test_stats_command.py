"""`paged-kv stats` shows processes, snapshots and traces in every form, or says why it cannot."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from paged_kv.command_line import main
from paged_kv.monitor import stats_table
from paged_kv.monitor.process_view import ProcessView
from paged_kv.monitor.published import SharedFile, read_shared
from paged_kv.monitor.runtime_folder import make_runtime_folder, process_start, runtime_folder
from paged_kv.pool.page_pool import PagePool
from tests.support.patience import wait_until
from tests.support.shown_process import SCRIPT, shown_process


@pytest.fixture(autouse=True)
def _own_runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")


def wait_until_published(folder: Path, pid: int) -> None:
    """Wait until the process shows everything."""
    published = folder / "paged-kv" / f"{pid}.json"
    wait_until(lambda: published.exists() and '"used":3' in published.read_text())


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """A process that others can look at, and its runtime folder."""
    folder = tmp_path_factory.mktemp("runtime")
    with shown_process(folder) as pid:
        wait_until_published(folder, pid)
        yield pid, folder


@pytest.fixture
def pid(shown: tuple[int, Path], monkeypatch: pytest.MonkeyPatch) -> int:
    number, folder = shown
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return number


def stats(*arguments: str) -> int:
    return main(["stats", *arguments])


def test_the_only_process_is_shown_to_the_byte(
    pid: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stats() == 0
    text = capsys.readouterr().out
    assert f"process {pid}:" in text
    # 320 tokens in 2 layers of float32, and 212 + 236 free slots after them.
    rows = {line.split("  ")[0]: line.split() for line in text.splitlines()}
    assert rows["allocated"][1:3] == ["20.48", "kB"]
    assert rows["+ last block"][3:5] == ["28.67", "kB"]
    assert rows["= used"][2:4] == ["49.15", "kB"]
    assert "sharing factor 1.67" in text
    assert "\x1b" not in text


def test_json_is_a_snapshot_that_can_be_shown_later(
    pid: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert stats("--json") == 0
    output = capsys.readouterr().out
    content: dict[str, Any] = json.loads(output)
    (pool,) = content["pools"]
    assert (content["pid"], pool["name"]) == (pid, "shown")
    assert (pool["stats"]["blocks_used"], pool["stats"]["blocks_shared"]) == (3, 2)
    assert pool["slabs"] == [[0, 0, "fp16", "s2"], [0, 1, "fp16", "u"]]
    assert [each[1:4] for each in pool["sequences"]] == [[300, 2, 2], [300, 2, 2], [20, 1, 0]]
    assert ProcessView.from_dict(content).as_dict() == content
    saved = tmp_path / "saved.json"
    saved.write_text(output)
    assert stats() == 0
    live = capsys.readouterr().out
    assert stats(str(saved)) == 0
    assert capsys.readouterr().out == live


def test_making_a_pool_starts_the_thread_that_publishes() -> None:
    PagePool(1, max_bytes=1 << 20)
    assert "paged-kv" in [thread.name for thread in threading.enumerate()]


def test_a_program_is_shown_that_imports_nothing_by_the_packages_own_names(tmp_path: Path) -> None:
    """As the commands do."""
    modules = (
        "from paged_kv.cache.paged_kv_cache import PagedKVCache\n"
        "from paged_kv.pool.page_pool import PagePool\n"
        "from paged_kv.steps.sequence import Sequence"
    )
    script = SCRIPT.replace("from paged_kv import PagedKVCache, PagePool, Sequence", modules)
    assert script != SCRIPT
    with shown_process(tmp_path, script) as number:
        wait_until_published(tmp_path, number)


def test_prometheus_text(pid: int, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("prometheus_client")
    assert stats("--prom", "--pid", str(pid)) == 0
    lines = capsys.readouterr().out.splitlines()
    labels = '{model="shown",pool="0"}'
    assert f"paged_kv:kv_active_bytes{labels} 49152.0" in lines
    assert f"paged_kv:cow_copies_total{labels} 0.0" in lines
    used = 'paged_kv:kv_blocks{format="fp16",model="shown",pool="0",state="used"} 3.0'
    assert used in lines


@pytest.mark.slow
def test_watch_draws_a_map_until_the_process_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    over = tmp_path / "over"
    draw, times = stats_table.screen, iter(range(10_000))

    def drawn(*arguments: Any) -> Any:
        if next(times) == 4:
            over.touch()
        return draw(*arguments)

    ends = SCRIPT.replace(
        "sys.stdin.readline()",
        f"import os, time\nwhile not os.path.exists({str(over)!r}): time.sleep(0.05)",
    )
    with shown_process(tmp_path, ends) as number:
        wait_until_published(tmp_path, number)
        monkeypatch.setattr(stats_table, "screen", drawn)
        assert stats("--watch", "--interval", "0.1") == 1
    captured = capsys.readouterr()
    assert captured.out.count(f"process {number}") > 3
    assert "▣▣" in captured.out
    assert "■" in captured.out
    assert "largest" in captured.out
    assert f"process {number} has ended" in captured.err


@pytest.mark.parametrize("suffix", ["svg", "png", "html"])
def test_plot_of_a_process(pid: int, tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / f"out.{suffix}"
    assert stats("--plot", str(out), "--seconds", "0.3", "--interval", "0.1") == 0
    begin = {"svg": b"<?xml", "png": b"\x89PNG", "html": b"<!doctype html>"}[suffix]
    content = out.read_bytes()
    assert content.startswith(begin)
    assert len(content) > 10_000
    assert b"<script" not in content


def test_several_processes_are_listed_and_chosen(
    pid: int, shown: tuple[int, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with shown_process(shown[1]) as other:
        wait_until(lambda: (shown[1] / "paged-kv" / f"{other}.json").exists())
        assert stats() == 1
        message = capsys.readouterr().err
        assert "2 processes have pools; choose one" in message
        assert f"--pid {pid} " in message
        assert f"--pid {other} " in message
        assert stats("--list") == 0
        pids = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
        assert set(pids) >= {str(pid), str(other)}
        assert stats("--pid", str(other)) == 0
        assert f"process {other}:" in capsys.readouterr().out
    assert not (shown[1] / "paged-kv" / f"{other}.json").exists()


def test_what_dead_processes_left_is_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with shown_process(tmp_path) as number:
        published = tmp_path / "paged-kv" / f"{number}.json"
        wait_until(published.exists)
        os.kill(number, signal.SIGKILL)
        wait_until(lambda: process_start(number) is None)
        assert published.exists()
        assert stats() == 1
        assert not published.exists()
    assert "no process of yours has a pool of pages" in capsys.readouterr().err


def test_an_earlier_process_of_the_same_number_is_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "paged-kv"
    folder.mkdir(mode=0o700)
    published = folder / f"{os.getpid()}.json"
    SharedFile(published).write(b'{"paged_kv": 1, "started": "another time"}')
    assert stats("--pid", str(os.getpid())) == 1
    assert not published.exists()
    assert f"process {os.getpid()} runs, and publishes nothing" in capsys.readouterr().err


def test_a_new_process_removes_what_dead_ones_left(tmp_path: Path) -> None:
    folder = tmp_path / "paged-kv"
    folder.mkdir(mode=0o700)
    (folder / "99999999.json").write_text("left")
    (folder / "other").write_text("not ours")
    with shown_process(tmp_path) as number:
        wait_until((folder / f"{number}.json").exists)
        assert {file.name for file in folder.iterdir()} == {f"{number}.json", "other"}


def test_a_process_with_another_version_is_left_out_unless_asked_for(
    pid: int, shown: tuple[int, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    parent = os.getppid()
    published = shown[1] / "paged-kv" / f"{parent}.json"
    content = {"paged_kv": 99, "started": process_start(parent)}
    SharedFile(published).write(json.dumps(content).encode())
    try:
        assert stats("--list") == 0
        listed = capsys.readouterr().out
        assert f"{pid} " in listed
        assert f"{parent} " not in listed
        assert stats("--pid", str(parent)) == 1
        assert "it has version 99" in capsys.readouterr().err
    finally:
        published.unlink()


def test_no_process_of_that_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert stats("--pid", "99999999") == 1
    assert "there is no process 99999999" in capsys.readouterr().err


def test_another_users_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int, number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "kill", refuse)
    assert stats("--pid", "1") == 1
    assert "process 1 is another user's" in capsys.readouterr().err


def test_a_folder_that_others_can_enter_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "paged-kv").mkdir()
    (tmp_path / "paged-kv").chmod(0o755)
    assert stats() == 1
    assert "that nobody else can enter: chmod 700" in capsys.readouterr().err
    # The process continues all the same.
    with shown_process(tmp_path):
        time.sleep(0.2)
    assert not list((tmp_path / "paged-kv").iterdir())


def test_a_linked_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "paged-kv").symlink_to(tmp_path / "real")
    assert stats() == 1
    assert "must be a folder of yours" in capsys.readouterr().err


def test_nothing_is_published_where_nobody_wants_it(tmp_path: Path) -> None:
    with shown_process(tmp_path, PAGED_KV_PUBLISH="0"):
        time.sleep(0.3)
        assert not (tmp_path / "paged-kv").exists()


def test_a_bad_interval_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError), shown_process(tmp_path, PAGED_KV_PUBLISH="soon"):
        pass


def test_a_forked_process_publishes_its_own_pools_and_leaves_its_parents_file(
    tmp_path: Path,
) -> None:
    forks = SCRIPT.replace(
        'print("ready", flush=True)',
        """
import os, time
for _ in range(50):
    child = os.fork()
    if not child:
        assert pool.stats().blocks_used == 3
        if _ == 49:
            other = PagePool(1, max_bytes=1 << 20, name="child")
            published = f"{os.environ['XDG_RUNTIME_DIR']}/paged-kv/{os.getpid()}.json"
            while not os.path.exists(published):
                time.sleep(0.01)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
print("ready", flush=True)""",
    )
    with shown_process(tmp_path, forks) as number:
        files = {file.name for file in (tmp_path / "paged-kv").iterdir()}
        assert f"{number}.json" in files
        # The last child published too, and did not notice its own end.
        assert len([name for name in files if name.endswith(".json")]) == 2


def test_the_runtime_folder_is_in_the_cache_folder_where_there_is_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert runtime_folder() == tmp_path / "paged-kv" / "run"
    assert make_runtime_folder().stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "paged-kv" / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f59")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no json", "neither a snapshot"),
        ("[]", "no snapshot of this paged_kv"),
        ('{"paged_kv": 99}', "it has version 99, and 1 is read"),
        ('{"paged_kv": 1, "pid": 3}', "this snapshot is broken"),
    ],
)
def test_a_file_that_is_no_snapshot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    file = tmp_path / "file"
    file.write_text(content)
    assert stats(str(file)) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--watch"], "leave out the file"),
        (["x", "--pid", "3"], "leave out the file"),
        (["missing"], "No such file"),
    ],
)
def test_arguments_that_do_not_go_together(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert stats(*arguments) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--json", "--prom"], ["--interval", "0"]])
def test_bad_usage_exits_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        stats(*arguments)
    assert exit_info.value.code == 2


def test_a_file_that_is_written_while_it_is_read_is_seen_whole(tmp_path: Path) -> None:
    file = SharedFile(tmp_path / "shared")
    with pytest.raises(FileNotFoundError):
        read_shared(tmp_path / "shared")
    is_over = Event()

    def write() -> None:
        for number in cycle([3, 40_000, 7, 9_000_000]):
            file.write(bytes([number % 251]) * number)
            if is_over.is_set():
                return

    file.write(b"anew")
    writing = Thread(target=write)
    writing.start()
    try:
        for _ in range(300):
            assert len(set(read_shared(tmp_path / "shared"))) in (1, 4)
    finally:
        is_over.set()
        writing.join()
    (tmp_path / "shared").write_bytes(b"0000000500000000\nwrong")
    with pytest.raises(OSError, match="is broken"):
        read_shared(tmp_path / "shared")
    file.remove()
    assert not (tmp_path / "shared").exists()


@pytest.mark.slow
def test_what_somebody_deletes_is_published_again(tmp_path: Path) -> None:
    with shown_process(tmp_path) as number:
        published = tmp_path / "paged-kv" / f"{number}.json"
        wait_until(published.exists)
        published.unlink()
        wait_until(published.exists)
