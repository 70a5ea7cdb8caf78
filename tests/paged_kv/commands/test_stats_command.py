"""`paged-kv stats` shows processes and snapshots in every form, or says why it cannot."""

import copy
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from paged_kv import PagedKVCache, PagePool
from paged_kv.command_line import main
from paged_kv.monitor import processes, stats_table
from paged_kv.monitor import publisher as publishing
from paged_kv.monitor.processes import ProcessView, make_runtime_folder, runtime_folder
from paged_kv.monitor.publisher import Publisher, publisher, view_process
from tests.support.layer_caches import caches_of
from tests.support.patience import wait_until
from tests.support.shown_process import SCRIPT, shown_process

SELF, OTHER = os.getpid(), os.getppid()


@pytest.fixture(autouse=True)
def _own_runtime_folder(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(publishing, "LOOK_S", 0.005)
    # It would take the place of the publishers of these tests.
    monkeypatch.setattr(publisher, "start", lambda: None)


def file_of(pid: int) -> Path:
    return runtime_folder() / f"{pid}.json"


def write_answer(pid: int, content: str, *, is_late: bool = False) -> None:
    """What a process has written, which answers all questions, or none."""
    file_of(pid).parent.mkdir(mode=0o700, exist_ok=True)
    file_of(pid).write_text(content)
    moment = 0 if is_late else 1 << 32
    os.utime(file_of(pid), (moment, moment))


@pytest.fixture(scope="module")
def pool() -> Iterator[PagePool]:
    """Two sequences of 300 tokens share two blocks, and a third has one block of its own."""
    pool = PagePool(2, max_bytes=1 << 22, name="shown")

    def written(count: int) -> list[PagedKVCache]:
        caches = caches_of(pool)
        for cache in caches:
            cache.update_and_fetch(*[mx.zeros((1, 1, count, 4))] * 2)
        return caches

    first = written(300)
    held = [first, copy.deepcopy(first), written(20)]
    yield pool
    held.clear()


@pytest.fixture
def shown(pool: PagePool) -> Iterator[Publisher]:
    """This process can be looked at."""
    made = Publisher(lambda: view_process([pool]))
    made.start()
    wait_until(processes.running_processes)
    yield made
    made.stop()


def stats(*arguments: str) -> int:
    return main(["stats", *arguments])


@pytest.mark.usefixtures("shown")
def test_the_only_process_is_shown_to_the_byte(capsys: pytest.CaptureFixture[str]) -> None:
    assert stats() == 0
    text = capsys.readouterr().out
    assert f"process {SELF}:" in text
    first = next(line for line in text.splitlines() if "%" in line)
    assert first == "internal fragmentation 58.3%, external fragmentation 0.0%"
    # 320 tokens in 2 layers of float32, and 212 + 236 free slots after them.
    rows = {line.split("  ")[0]: line.split() for line in text.splitlines()}
    assert rows["allocated"][1:3] == ["20.48", "kB"]
    assert rows["+ last block"][3:5] == ["28.67", "kB"]
    assert rows["= used"][2:4] == ["49.15", "kB"]
    assert "sharing factor 1.67" in text
    assert "\x1b" not in text


@pytest.mark.usefixtures("shown")
def test_json_is_a_snapshot_that_can_be_shown_later(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("prometheus_client")
    assert stats("--json") == 0
    output = capsys.readouterr().out
    content: dict[str, Any] = json.loads(output)
    (pool,) = content["pools"]
    assert (content["pid"], pool["name"]) == (SELF, "shown")
    assert (pool["stats"]["blocks_used"], pool["stats"]["blocks_shared"]) == (3, 2)
    assert pool["slabs"] == [[0, 0, "fp16", "s2"], [0, 1, "fp16", "u"]]
    assert [each[1:4] for each in pool["sequences"]] == [[300, 2, 2], [300, 2, 2], [20, 1, 0]]
    assert ProcessView.from_dict(content).as_dict() == content
    assert stats("--prom", "--pid", str(SELF)) == 0
    labels = f'model="shown",pool="{pool["number"]}"'
    assert f"paged_kv:kv_active_bytes{{{labels}}} 49152.0" in capsys.readouterr().out
    saved = tmp_path / "saved.json"
    saved.write_text(output)
    assert stats() == 0
    live = capsys.readouterr().out
    assert stats(str(saved)) == 0
    assert capsys.readouterr().out == live


def test_a_view_is_made_for_a_question_only() -> None:
    made: list[int] = []

    def view() -> ProcessView:
        made.append(1)
        return ProcessView(SELF, "", 1.0, ())

    lazy = Publisher(view)
    lazy.start()
    wait_until(file_of(SELF).exists)
    assert not made
    assert not file_of(SELF).stat().st_size
    assert [processes.running_process(SELF).time for _ in range(3)] == [1.0] * 3
    lazy.stop()
    assert 1 <= len(made) <= 3


def test_watch_draws_a_map_until_the_process_ends(
    shown: Publisher, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, times = stats_table.screen, iter(range(10_000))

    def drawn(*arguments: Any) -> Any:
        if next(times) == 4:
            shown.stop()
        return draw(*arguments)

    monkeypatch.setattr(stats_table, "screen", drawn)
    assert stats("--watch", "--interval", "0.001") == 1
    captured = capsys.readouterr()
    assert captured.out.count(f"process {SELF}") > 3
    for part in ("▣▣", "■", "largest"):
        assert part in captured.out
    assert f"process {SELF} has ended" in captured.err


@pytest.mark.slow
@pytest.mark.usefixtures("shown")
def test_plot_of_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    # Its title is no formula.
    monkeypatch.setattr(sys, "orig_argv", ["generate", "--prompt", "$\\x$"])
    for suffix, begin in (("svg", b"<?xml"), ("png", b"\x89PNG"), ("html", b"<!doctype html>")):
        out = tmp_path / f"out.{suffix}"
        assert stats("--plot", str(out), "--seconds", "0.03", "--interval", "0.01") == 0
        content = out.read_bytes()
        assert content.startswith(begin)
        assert len(content) > 10_000
        assert b"<script" not in content


@pytest.mark.usefixtures("shown")
def test_several_processes_are_listed_and_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    view = ProcessView(OTHER, "generate --prompt [/INST]", 1.0, ())
    write_answer(OTHER, json.dumps(view.as_dict()))
    assert stats() == 1
    message = capsys.readouterr().err
    for part in ("2 processes have pools; choose one", f"--pid {SELF} ", f"--pid {OTHER} "):
        assert part in message
    assert stats("--list") == 0
    listed = capsys.readouterr().out
    assert "--prompt [/INST]" in listed
    assert {line.split()[0] for line in listed.splitlines()[1:]} >= {str(SELF), str(OTHER)}
    assert stats("--pid", str(OTHER)) == 0
    assert f"process {OTHER}:" in capsys.readouterr().out


@pytest.mark.slow
def test_a_real_process_is_shown_and_what_it_leaves_is_removed(
    runtime: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It imports nothing by the package's own names, as the commands do."""
    modules = (
        "from paged_kv.cache.paged_kv_cache import PagedKVCache\n"
        "from paged_kv.pool.page_pool import PagePool\n"
        "from paged_kv.steps.sequence import Sequence"
    )
    script = SCRIPT.replace("from paged_kv import PagedKVCache, PagePool, Sequence", modules)
    assert script != SCRIPT
    with shown_process(runtime, script) as number:
        wait_until(lambda: [view.pid for view in processes.running_processes()] == [number])
        os.kill(number, signal.SIGKILL)
        os.waitpid(number, 0)
        assert file_of(number).exists()
        assert stats() == 1
        assert not file_of(number).exists()
    assert "no process of yours has a pool of pages" in capsys.readouterr().err


def test_a_new_process_removes_what_dead_ones_left() -> None:
    """What one with its own number left is no answer."""
    view = ProcessView(SELF, "anew", 1.0, ())
    write_answer(99999999, "")
    write_answer(SELF, "{}", is_late=True)
    file_of(99999999).with_suffix(".part").touch()
    (runtime_folder() / "other.json").write_text("not ours")
    anew = Publisher(lambda: view)
    anew.start()
    wait_until(lambda: processes.running_processes() == [view])
    names = {path.name for path in runtime_folder().iterdir()}
    assert names == {f"{SELF}.json", "other.json", "question"}
    anew.stop()
    assert not file_of(SELF).exists()


@pytest.mark.usefixtures("shown")
@pytest.mark.parametrize(
    ("content", "said"), [('{"paged_kv": 99}', "it has version 99"), ("", "runs, and")]
)
def test_a_process_of_another_version_or_that_has_just_begun_is_left_out_unless_asked_for(
    capsys: pytest.CaptureFixture[str], content: str, said: str
) -> None:
    write_answer(OTHER, content)
    assert stats("--list") == 0
    listed = capsys.readouterr().out
    assert f"{SELF} " in listed
    assert f"{OTHER} " not in listed
    assert stats("--pid", str(OTHER)) == 1
    assert said in capsys.readouterr().err


def test_a_process_that_hangs_is_named_and_the_others_are_shown(
    shown: Publisher,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(processes, "PATIENCE_S", 1.0)
    write_answer(OTHER, "{}", is_late=True)
    assert stats() == 0
    assert f"process {SELF}:" in capsys.readouterr().out
    assert f"process {OTHER} has not answered within 1 s" in caplog.text
    shown.stop()
    assert stats() == 1
    assert f"process {OTHER} has not answered" in capsys.readouterr().err
    assert file_of(OTHER).exists()


def test_a_process_that_cannot_be_looked_at(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stats("--pid", "99999999") == 1
    assert "there is no process 99999999" in capsys.readouterr().err

    def refuse(pid: int, number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "kill", refuse)
    assert stats("--pid", "1") == 1
    assert "process 1 is another user's" in capsys.readouterr().err


@pytest.mark.parametrize("is_linked", [False, True])
def test_a_folder_that_others_can_enter_is_refused(
    runtime: Path, capsys: pytest.CaptureFixture[str], is_linked: bool
) -> None:
    folder = runtime / "paged-kv"
    if is_linked:
        (runtime / "real").mkdir(mode=0o700)
        folder.symlink_to(runtime / "real")
    else:
        folder.mkdir()
        folder.chmod(0o755)
    assert stats() == 1
    assert "must be a folder of yours that nobody else can enter" in capsys.readouterr().err
    with pytest.raises(PermissionError):
        make_runtime_folder(folder)
    # The process continues all the same.
    hidden = Publisher(lambda: ProcessView(SELF, "", 1.0, ()))
    hidden.start()
    assert hidden._thread is not None
    hidden._thread.join()
    assert not list(folder.iterdir())


@pytest.mark.slow
def test_a_forked_process_shows_its_own_pools_and_leaves_its_parents_file(runtime: Path) -> None:
    forks = SCRIPT.replace(
        'print("ready", flush=True)',
        """
import os, time
child = os.fork()
if not child:
    other = PagePool(1, max_bytes=1 << 20, name="child")
    time.sleep(1000)
print("ready", flush=True)""",
    )
    with shown_process(runtime, forks) as number:
        wait_until(lambda: len(processes.running_processes()) == 2)
        names = {
            view.pid: [pool.name for pool in view.pools] for view in processes.running_processes()
        }
        (child,) = names.keys() - {number}
        try:
            assert names == {number: ["shown"], child: ["shown", "child"]}
            os.kill(number, signal.SIGKILL)
            os.waitpid(number, 0)
            assert [view.pid for view in processes.running_processes()] == [child]
            assert not file_of(number).exists()
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_file_that_is_no_snapshot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content, message in (
        ("no json", "is no snapshot, which"),
        ("[]", "no snapshot of this paged_kv"),
        ('{"paged_kv": 99}', "it has version 99, and 1 is read"),
        ('{"paged_kv": 1, "pid": 3}', "this snapshot is broken"),
    ):
        (tmp_path / "file").write_text(content)
        assert stats(str(tmp_path / "file")) == 1
        assert message in capsys.readouterr().err
