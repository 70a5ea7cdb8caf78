"""The command line checks its options: each wrong value gives one line that names the option and
the remedy, and an exit status; no file is made or overwritten."""

import shlex
import shutil
from pathlib import Path

import pytest

from paged_kv import embedded_model
from paged_kv.command_line import main
from paged_kv.monitor.publisher import Publisher
from tests.support.store_entries import open_store

GENERATE = ["generate", "--prompt", "import os"]
HUGE = "9" * 5000
NO_FOLDER = "there is no folder 'missing': give "
NO_WEIGHTS = "the folder 'bare' holds no weights (*.safetensors)"

# For each command its options, in the folder of `files`: a text, an empty file, bytes, a folder and
# a page store.
REFUSED: dict[str, list[tuple[str, str]]] = {
    "generate --prompt a": [
        *[(f"--temp {bad}", "argument --temp: ") for bad in ("-1", "nan", "inf", "warm")],
        *[(f"--seed {bad}", "argument --seed: ") for bad in ("-1", "x", str(1 << 64), HUGE)],
        *[
            (f"--max-tokens {bad}", "argument --max-tokens: ")
            for bad in ("0", "-1", "1.5", "many", "²", HUGE)
        ],
        *[
            (f"--max-kv-bytes {bad}", "argument --max-kv-bytes: ")
            for bad in ("0", "-1", "4GBB", "10GBB")
        ],
        (f"--max-kv-bytes {HUGE}", "is more than a 64-bit number of bytes"),
        ("--page-format q3", "argument --page-format: 'q3' is no page format"),
        ("--model ''", "argument --model: it is empty"),
        ("--model ./text", "there is no folder './text': give --model the folder of"),
        ("--model folder", "the folder 'folder' holds no configuration (config.json)"),
        ("--model bare", NO_WEIGHTS),
        ("--model broken", "--model broken cannot be loaded: JSONDecodeError"),
        ("--model unknown", "Model type unheard_of not supported: a newer mlx-lm may know"),
        ("--store ''", "argument --store: it is empty"),
        ("--store text", "text is a file: name a folder for the pages"),
        ("--store-bytes 1kB", "argument --store-bytes: '1kB' is too small"),
        ("--store-bytes 5GB", "--store-bytes is an option of --store: add"),
        ("--offload folder", "--offload is an option of --read-tokens: add"),
        ("--num-samples 2 --temp 0", "--temp 0 makes 2 equal samples: raise"),
        ("--prompt ''", "a prompt is empty: give --prompt some text"),
        ("--prompt \udcff", "a prompt is not UTF-8: give --prompt some text"),
    ],
    "bench": [
        ("--model missing", NO_FOLDER + "--model the folder"),
        ("--json folder", "folder is a folder: name a file to write"),
        ("--plot out.jpeg", "out.jpeg must end in one of .svg, .png, .pdf"),
    ],
    "doctor": [
        ("--report folder", "folder is a folder: name a file to write"),
    ],
    "server --port 0 --model broken": [
        ("--model missing", NO_FOLDER + "--model the folder"),
        ("--draft-model missing", NO_FOLDER + "--draft-model"),
        ("--store text", "text is a file: name a folder for the pages"),
        ("--port 65536", "argument --port: 65536 is no port: give one up to 65535"),
        ("--header-timeout 0", "argument --header-timeout: '0' is not a number of seconds above 0"),
        ("--prefill-from http://other:80800", "argument --prefill-from: Port out of range"),
        (f"--max-kv-bytes {HUGE}", "argument --max-kv-bytes: "),
    ],
    "stats": [
        *[(f"--interval {bad}", "argument --interval: ") for bad in ("0", "nan", "1e300", "soon")],
        ("--pid 0", "argument --pid: "),
        (f"--pid {'9' * 30}", f"there is no process {'9' * 30}"),
        ("bytes", "bytes is no snapshot"),
        ("text --list", "--pid, --watch and --list show running processes"),
        ("--list --pid 1", "--list shows all processes: leave out --pid"),
        ("''", "argument file: it is empty"),
        ("text --interval 1", "--interval is between samples: add --watch or"),
        ("--seconds 1", "--seconds is how long --plot samples a process: add it"),
    ],
    "completion": [("fish", "argument shell: invalid choice: 'fish'")],
    "--log-level": [("loud doctor", "argument --log-level: invalid choice: 'loud'")],
    "trace": [
        ("replay text", "text, line 1: 'mine\\n' is no JSON object"),
        ("replay bytes", "bytes, line 1: "),
        ("replay empty --max-kv-bytes 1GB", "empty has no requests"),
        ("replay text --eviction old", "argument --eviction: invalid choice: 'old'"),
        ("replay text --page-format q3", "argument --page-format: 'q3' is no page format"),
        ("record text paged-kv", "text is not empty, and a trace would overwrite it"),
        ("record empty", "name a program behind the file"),
        ("record empty ./missing", "./missing cannot be run"),
    ],
    "store": [
        ("list --store missing", "there is no page store in missing"),
        ("gc --store store --store-bytes 1", "argument --store-bytes: '1' is"),
    ],
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Arguments that users may pass by mistake."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "text").write_text("mine\n")
    (folder / "empty").touch()
    (folder / "bytes").write_bytes(b"\xff\xfe\x00" * 100)
    (folder / "folder").mkdir()
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text("{")
    (folder / "broken" / "model.safetensors").touch()
    (folder / "bare").mkdir()
    (folder / "bare" / "config.json").write_text("{}")
    shutil.copytree(embedded_model(), folder / "unknown")
    config = (folder / "unknown" / "config.json").read_text()
    (folder / "unknown" / "config.json").write_text(config.replace('"llama"', '"unheard_of"'))
    with open_store(folder / "store"):
        pass
    return folder


def tree(folder: Path) -> dict[Path, tuple[int, int]]:
    """Sizes and times of all files outside the store, whose index writes at any time."""
    paths = [path for path in folder.rglob("*") if path.parent.name != "store"]
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in paths}


@pytest.mark.parametrize("command", REFUSED)
@pytest.mark.slow
def test_it_is_refused_in_words(
    command: str, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if command == "bench":
        pytest.importorskip("matplotlib", reason="needs the extra plot")
    monkeypatch.chdir(files)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(files / "none"))
    # A thread would make its socket in that folder.
    monkeypatch.setattr(Publisher, "start", lambda self: None)
    before = tree(files)
    for options, message in REFUSED[command]:
        try:
            status = main(shlex.split(f"{command} {options}"))
        except SystemExit as ended:
            status = int(ended.code or 0)
        captured = capsys.readouterr()
        assert status in (1, 2), options
        assert message in captured.err
        assert "Errno" not in captured.err
        # What is wrong, and for an option where to look.
        assert len(captured.err.splitlines()) <= 2
        assert captured.out == "", options
        assert tree(files) == before, options


def test_a_budget_that_is_too_small_is_told_in_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GENERATE, "--max-kv-bytes", "10kB", "--max-tokens", "2"]) == 1
    error = capsys.readouterr().err
    enough = error.partition("raise --max-kv-bytes to at least ")[2].partition(", or")[0]
    assert "max_bytes" not in error
    assert main([*GENERATE, "--max-kv-bytes", enough.replace(",", ""), "--max-tokens", "2"]) == 0
