"""`paged-kv stats` shows processes, snapshots and traces in every form, or says why it cannot."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from paged_kv.command_line import main
from paged_kv.monitor import processes, stats_table
from paged_kv.monitor.process_view import ProcessView
from paged_kv.monitor.processes import make_runtime_folder, runtime_folder
from paged_kv.monitor.publisher import Publisher, is_wanted, publisher
from paged_kv.pool.page_pool import PagePool
from tests.support.patience import wait_until
from tests.support.shown_process import SCRIPT, shown_process


@pytest.fixture(autouse=True)
def _own_runtime_folder(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")


def socket_of(folder: Path, pid: int) -> Path:
    return folder / "paged-kv" / f"{pid}.sock"


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """A socket that stands for a process."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))
        made.listen()
        yield made
    path.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def shown() -> Iterator[tuple[int, Path]]:
    """A process that others can look at, and its runtime folder."""
    with TemporaryDirectory(dir="/tmp") as folder, shown_process(Path(folder)) as pid:
        wait_until(socket_of(Path(folder), pid).exists)
        yield pid, Path(folder)


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


def test_making_a_pool_starts_the_thread_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Publisher] = []
    monkeypatch.setattr(publisher, "start", lambda: started.append(publisher))
    PagePool(1, max_bytes=1 << 20)
    assert started == [publisher]


def test_a_program_is_shown_that_imports_nothing_by_the_packages_own_names(runtime: Path) -> None:
    """As the commands do."""
    modules = (
        "from paged_kv.cache.paged_kv_cache import PagedKVCache\n"
        "from paged_kv.pool.page_pool import PagePool\n"
        "from paged_kv.steps.sequence import Sequence"
    )
    script = SCRIPT.replace("from paged_kv import PagedKVCache, PagePool, Sequence", modules)
    assert script != SCRIPT
    with shown_process(runtime, script) as number:
        wait_until(socket_of(runtime, number).exists)


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
    runtime: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    over = runtime / "over"
    draw, times = stats_table.screen, iter(range(10_000))

    def drawn(*arguments: Any) -> Any:
        if next(times) == 4:
            over.touch()
        return draw(*arguments)

    ends = SCRIPT.replace(
        "sys.stdin.readline()",
        f"import os, time\nwhile not os.path.exists({str(over)!r}): time.sleep(0.05)",
    )
    with shown_process(runtime, ends) as number:
        wait_until(socket_of(runtime, number).exists)
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
        wait_until(socket_of(shown[1], other).exists)
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
    assert not socket_of(shown[1], other).exists()


def test_what_dead_processes_left_is_removed(
    runtime: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with shown_process(runtime) as number:
        left = socket_of(runtime, number)
        wait_until(left.exists)
        os.kill(number, signal.SIGKILL)
        os.waitpid(number, 0)
        assert left.exists()
        assert stats() == 1
        assert not left.exists()
    assert "no process of yours has a pool of pages" in capsys.readouterr().err


def test_a_new_process_removes_what_dead_ones_left(runtime: Path) -> None:
    with listening(socket_of(runtime, 99999999)) as dead:
        dead.close()
        (runtime / "paged-kv" / "other").write_text("not ours")
        with shown_process(runtime) as number:
            wait_until(socket_of(runtime, number).exists)
            names = {path.name for path in (runtime / "paged-kv").iterdir()}
            assert names == {f"{number}.sock", "other"}


def test_a_process_with_the_number_of_a_dead_one_is_shown(runtime: Path) -> None:
    with listening(socket_of(runtime, os.getpid())) as dead:
        dead.close()
        view = ProcessView(os.getpid(), "anew", 1.0, ())
        anew = Publisher(lambda: view)
        anew.start()
        wait_until(lambda: processes.running_processes() == [view])
        anew.stop()
        assert not socket_of(runtime, os.getpid()).exists()


def test_a_process_with_another_version_is_left_out_unless_asked_for(
    pid: int, shown: tuple[int, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    parent = os.getppid()
    path = socket_of(shown[1], parent)
    with listening(path) as other:

        def answer() -> None:
            for _ in range(2):
                with other.accept()[0] as connection:
                    connection.sendall(b'{"paged_kv": 99}')

        answering = threading.Thread(target=answer)
        answering.start()
        assert stats("--list") == 0
        listed = capsys.readouterr().out
        assert f"{pid} " in listed
        assert f"{parent} " not in listed
        assert stats("--pid", str(parent)) == 1
        assert "it has version 99" in capsys.readouterr().err
        answering.join()


def test_a_process_that_hangs_is_named_and_the_others_are_shown(
    pid: int,
    shown: tuple[int, Path],
    runtime: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(processes, "PATIENCE_S", 1.0)
    parent = os.getppid()
    with listening(socket_of(shown[1], parent)):
        assert stats() == 0
        assert f"process {pid}:" in capsys.readouterr().out
        assert f"process {parent} has not answered within 1 s" in caplog.text
        assert stats("--pid", str(parent)) == 1
        assert f"process {parent} has not answered" in capsys.readouterr().err
        assert socket_of(shown[1], parent).exists()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    with listening(socket_of(runtime, parent)):
        assert stats() == 1
        assert f"process {parent} has not answered" in capsys.readouterr().err


def test_a_process_that_dies_while_it_answers_has_ended(
    runtime: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with listening(socket_of(runtime, os.getpid())) as dying:

        def answer() -> None:
            with dying.accept()[0] as connection:
                connection.sendall(b'{"paged_kv": ')

        answering = threading.Thread(target=answer)
        answering.start()
        assert stats() == 1
        assert "no process of yours has a pool of pages" in capsys.readouterr().err
        answering.join()


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
    runtime: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runtime / "paged-kv").mkdir()
    (runtime / "paged-kv").chmod(0o755)
    assert stats() == 1
    assert "that nobody else can enter: chmod 700" in capsys.readouterr().err
    # The process continues all the same.
    with shown_process(runtime):
        time.sleep(0.2)
    assert not list((runtime / "paged-kv").iterdir())


def test_a_linked_folder_is_refused(runtime: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runtime / "real").mkdir(mode=0o700)
    (runtime / "paged-kv").symlink_to(runtime / "real")
    assert stats() == 1
    assert "must be a folder of yours" in capsys.readouterr().err


def test_a_process_whose_socket_would_have_too_long_a_path_goes_on(
    runtime: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = runtime / ("long" * 30)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    with shown_process(folder) as number:
        assert stats("--pid", str(number)) == 1
    assert "as where the path has more than 103 bytes" in capsys.readouterr().err


def test_nothing_is_shown_where_nobody_wants_it(runtime: Path) -> None:
    with shown_process(runtime, PAGED_KV_PUBLISH="0"):
        time.sleep(0.3)
        assert not (runtime / "paged-kv").exists()


@pytest.mark.parametrize(("text", "shown"), [("0", False), ("0.0", False), ("1", True)])
def test_a_wish_is_a_number(
    text: str, shown: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PAGED_KV_PUBLISH", text)
    assert is_wanted() is shown
    assert not caplog.records


def test_seconds_between_looks_show_a_process_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Versions before this one took them."""
    monkeypatch.setenv("PAGED_KV_PUBLISH", "0.5")
    assert is_wanted()
    (record,) = caplog.records
    assert "PAGED_KV_PUBLISH=0.5 has no seconds between looks any more" in record.getMessage()


@pytest.mark.parametrize("text", ["-1", "inf", "nan"])
def test_other_numbers_are_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_KV_PUBLISH", text)
    with pytest.raises(ValueError, match=f"or 1, got '{text}'"):
        is_wanted()


def test_a_bad_wish_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_KV_PUBLISH", "soon")
    with pytest.raises(ValueError, match="or 1, got 'soon'"):
        Publisher(lambda: ProcessView(1, "", 1.0, ())).start()


def test_a_forked_process_shows_its_own_pools_and_leaves_its_parents_socket(
    runtime: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forks = SCRIPT.replace(
        'print("ready", flush=True)',
        """
import os, time
own = f"{os.environ['XDG_RUNTIME_DIR']}/paged-kv/%d.sock"
def wait_until_shown():
    while not os.path.exists(own % os.getpid()):
        time.sleep(0.01)
wait_until_shown()
for number in range(50):
    child = os.fork()
    if not child:
        assert pool.stats().blocks_used == 3
        if number == 49:
            other = PagePool(1, max_bytes=1 << 20, name="child")
            wait_until_shown()
            time.sleep(1000)
        os._exit(0)
    if number < 49:
        assert os.waitpid(child, 0)[1] == 0
while not os.path.exists(own % child):
    time.sleep(0.01)
print("ready", flush=True)""",
    )
    with shown_process(runtime, forks) as number:
        paths = set((runtime / "paged-kv").iterdir()) - {socket_of(runtime, number)}
        (child,) = [int(path.stem) for path in paths]
        try:
            for pid, pools in ((number, ["shown"]), (child, ["shown", "child"])):
                view = processes.running_process(pid)
                assert [pool.name for pool in view.pools] == pools
            os.kill(number, signal.SIGKILL)
            os.waitpid(number, 0)
            assert [view.pid for view in processes.running_processes()] == [child]
            assert not socket_of(runtime, number).exists()
        finally:
            os.kill(child, signal.SIGKILL)


def test_the_runtime_folder_is_in_the_cache_folder_where_there_is_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert runtime_folder() == tmp_path / "paged-kv" / "run"
    make_runtime_folder(runtime_folder())
    assert runtime_folder().stat().st_mode & 0o777 == 0o700
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


@pytest.mark.slow
def test_what_somebody_deletes_is_made_again(runtime: Path) -> None:
    with shown_process(runtime) as number:
        path = socket_of(runtime, number)
        wait_until(path.exists)
        path.unlink()
        wait_until(path.exists)
        assert processes.running_process(number).pid == number
