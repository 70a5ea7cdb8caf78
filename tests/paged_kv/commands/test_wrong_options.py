"""The command line checks its options: each wrong value gives one line that names the option and
the remedy, and an exit status; no file is made or overwritten."""

import io
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from paged_kv.command_line import main
from paged_kv.embedded import embedded_model
from paged_kv.monitor.publisher import Publisher
from paged_kv.sizes import counted
from paged_kv.trace.synthetic_load import Load, synthesize
from tests.support.store_entries import open_store

GENERATE = ["generate", "--prompt", "import os"]
SYNTHESIZE = ["trace", "synthesize", "new"]
HUGE = "9" * 5000
PUBLIC = '{"timestamp": 0, "input_length": 9, "output_length": 9, "hash_ids": [0]}'

# In the folder of `files`: a text, an empty file, bytes, traces, a folder and a page store.
REFUSED: list[tuple[list[str], str]] = [
    *[([*GENERATE, "--temp", bad], "argument --temp: ") for bad in ("-1", "nan", "inf", "warm")],
    *[([*GENERATE, "--seed", bad], "argument --seed: ") for bad in ("-1", "x", str(1 << 64), HUGE)],
    *[
        ([*GENERATE, option, bad], f"argument {option}: ")
        for option in ("--max-tokens", "--num-samples")
        for bad in ("0", "-1", "1.5", "many", "²", HUGE)
    ],
    *[
        ([*GENERATE, "--max-kv-bytes", bad], "argument --max-kv-bytes: ")
        for bad in ("0", "-1", "4GBB")
    ],
    ([*GENERATE, "--max-kv-bytes", HUGE], "is more than a 64-bit number of bytes"),
    ([*GENERATE, "--page-format", "q3"], "argument --page-format: 'q3' is no page format"),
    ([*GENERATE, "--page-format", "q8/q4/q4"], "no page format"),
    ([*GENERATE, "--page-format", ""], "no page format"),
    ([*GENERATE, "--model", ""], "argument --model: it is empty"),
    ([*GENERATE, "--model", "text"], "there is no folder 'text': give --model the folder of"),
    ([*GENERATE, "--model", "./text"], "there is no folder './text': give --model the folder of"),
    ([*GENERATE, "--model", "folder"], "the folder 'folder' holds no configuration (config.json)"),
    ([*GENERATE, "--model", "bare"], "the folder 'bare' holds no weights (*.safetensors): give"),
    ([*GENERATE, "--model", "broken"], "--model broken cannot be loaded: JSONDecodeError"),
    (
        [*GENERATE, "--model", "unknown"],
        "Model type unheard_of not supported: a newer mlx-lm may know",
    ),
    ([*GENERATE, "--draft-model", "missing"], "there is no folder 'missing': give --draft-model"),
    ([*GENERATE, "--draft-model", "bare"], "the folder 'bare' holds no weights"),
    ([*GENERATE, "--draft-model", "broken"], "--draft-model broken cannot be loaded: JSONDecode"),
    (["bench", "--model", "missing"], "there is no folder 'missing': give --model the folder"),
    (["bench", "--model", "bare"], "the folder 'bare' holds no weights"),
    *[
        (["bench", option, file], message)
        for option in ("--json", "--plot")
        for file, message in (
            ("folder", "folder is a folder: name a file to write"),
            ("no/out.svg", "there is no folder no for out.svg: make it"),
        )
    ],
    (["bench", "--plot", "out.jpeg"], "out.jpeg must end in one of .svg, .png, .pdf"),
    (["doctor", "--report", "folder"], "folder is a folder: name a file to write"),
    (["doctor", "--report", "no/out.md"], "there is no folder no for out.md: make it"),
    *[
        (["server", "--port", "0", option, value], message)
        for option, value, message in (
            ("--model", "missing", "there is no folder 'missing': give --model the folder"),
            ("--model", "bare", "the folder 'bare' holds no weights"),
        )
    ],
    *[
        (["server", "--model", "broken", *options], message)
        for options, message in (
            (["--draft-model", "missing"], "there is no folder 'missing': give --draft-model"),
            (["--adapter-path", "missing"], "there is no folder 'missing': give --adapter-path"),
            (["--store", "text"], "text is a file: name a folder for the pages"),
            (["--port", "65536"], "--port 65536 is no port: give one up to 65535"),
        )
    ],
    ([*GENERATE, "--store", ""], "argument --store: it is empty"),
    ([*GENERATE, "--store", "text"], "text is a file: name a folder for the pages"),
    ([*GENERATE, "--store-bytes", "1kB"], "argument --store-bytes: '1kB' is too small"),
    ([*GENERATE, "--store-bytes", "5GB"], "--store-bytes limits the folder of --store: add"),
    ([*GENERATE, "--offload", "folder"], "--offload is for decode steps that do not read all: add"),
    ([*GENERATE, "--wait-for-pages"], "--wait-for-pages is an option of --offload: add"),
    (["plan", "--offload", "folder"], "--offload is for decode steps that do not read all: add"),
    ([*GENERATE, "--num-samples", "2", "--temp", "0"], "--temp 0 makes 2 equal samples: raise"),
    ([*GENERATE, "--prompt", ""], "a prompt is empty: give --prompt some text"),
    ([*GENERATE, "--prompt", "\udcff"], "a prompt is not UTF-8: give --prompt some text"),
    (["generate", "--prompt", "-"], "a prompt is not UTF-8"),
    *[
        (["server", option, bad], f"argument {option}: ")
        for option, bad in (
            ("--max-kv-bytes", HUGE),
            ("--page-format", "q3"),
            ("--store", ""),
            ("--store-bytes", "1kB"),
        )
    ],
    *[
        (["stats", option, bad], f"argument {option}: ")
        for option in ("--interval", "--seconds")
        for bad in ("0", "-1", "nan", "1e300", "soon")
    ],
    *[(["stats", "--pid", bad], "argument --pid: ") for bad in ("0", "-1", "x", HUGE)],
    (["stats", "--pid", "9" * 30], f"there is no process {'9' * 30}"),
    (["stats", "missing"], "missing: No such file or directory"),
    (["stats", "folder"], "folder: Is a directory"),
    (["stats", "text"], "text is neither a snapshot"),
    (["stats", "bytes"], "bytes is neither a snapshot"),
    (["stats", "trace", "--list"], "--pid, --watch and --list show running processes"),
    (["stats", "--list", "--pid", "1"], "--list shows all processes: leave out --pid"),
    (["stats", "trace", "--plot", "out.jpeg"], "out.jpeg must end in one of .svg, .png, .html"),
    (["stats", "trace", "--plot", "no/out.svg"], "there is no folder no for out.svg: make it"),
    (["stats", ""], "argument file: it is empty"),
    (["stats", "trace", "--interval", "1"], "--interval is between samples: add --watch or"),
    (["stats", "--seconds", "1"], "--seconds is how long --plot samples a process: add it"),
    (["stats", "trace", "--seconds", "1", "--plot", "a.svg"], "--seconds is how long --plot"),
    (["server", "--model", "folder", "--store-bytes", "5GB"], "--store-bytes limits the folder"),
    (["completion", "fish"], "argument shell: invalid choice: 'fish'"),
    (["trace", "replay", "missing"], "missing: No such file or directory"),
    (["trace", "replay", "folder"], "folder: Is a directory"),
    (["trace", "replay", "bytes"], "bytes is no trace of version 1: PAGED_KV_TRACE=FILE records"),
    (["trace", "replay", "short"], "line 2 of the trace makes no sense: k 0"),
    (["trace", "replay", "trace", "--page-size", "0"], "argument --page-size: "),
    (["trace", "replay", "trace", "--max-kv-bytes", "0"], "argument --max-kv-bytes: "),
    (["trace", "synthesize", "text"], "text exists, and a trace would overwrite it"),
    (["trace", "synthesize", "folder"], "no trace can be written to "),
    (["trace", "synthesize", "no/trace"], "(No such file or directory): name a file in a folder"),
    *[([*SYNTHESIZE, f"--lengths={bad}"], "argument --lengths: ") for bad in (HUGE, ",", "1,²")],
    ([*SYNTHESIZE, f"--sequences={HUGE}"], "argument --sequences: "),
    ([*SYNTHESIZE, "--churn=x"], "argument --churn: "),
    ([*SYNTHESIZE, "--seed=x"], "argument --seed: "),
    (
        ["trace", "replay", "trace", "--eviction", "old"],
        "argument --eviction: invalid choice: 'old'",
    ),
    (["trace", "replay", "trace", "--states", "0"], "argument --states: "),
    *[
        (["trace", "agents", "new", f"{option}={bad}"], f"argument {option}: ")
        for option in ("--agents", "--requests", "--layers", "--max-kv-bytes")
        for bad in ("0", "x", HUGE)
    ],
    (["trace", "agents", "text"], "text exists, and a trace would overwrite it"),
    (["trace", "agents", "no/trace"], "(No such file or directory): name a file in a folder"),
    (["trace", "import", "vllm", "text", "new"], "argument format: invalid choice: 'vllm'"),
    (["trace", "import", "azure", "missing", "new"], "missing: No such file or directory"),
    (["trace", "import", "azure", "folder", "new"], "folder: Is a directory"),
    (["trace", "import", "azure", "text", "new"], "text, line 1: the header is 'mine"),
    (["trace", "import", "mooncake", "empty", "new"], "empty, line 1: the file has no requests"),
    (["trace", "import", "mooncake", "bytes", "new"], "bytes, line 1: "),
    (["trace", "import", "mooncake", "public", "text"], "text exists, and a trace would overwrite"),
    (["store", "list", "--store", "missing"], "there is no page store in missing"),
    (["store", "list", "--store", ""], "argument --store: it is empty"),
    (["store", "gc", "--store", "store", "--store-bytes", "1"], "argument --store-bytes: '1' is"),
    (["store", "export", "text", "--store", "store"], "text exists, and export overwrites"),
    (["store", "export", "folder", "--store", "store"], "folder exists, and export"),
    (
        ["store", "export", "no/tar", "--store", "store"],
        "there is no folder no for tar: make it first",
    ),
    (["store", "import", "missing", "--store", "made"], "missing: No such file or directory"),
    (["store", "import", "folder", "--store", "made"], "folder: Is a directory"),
    (["store", "import", "text", "--store", "made"], "text is not an export of a page store"),
    (["store", "import", "empty", "--store", "made"], "empty is not an export of a page store"),
    (["--log-level", "loud", "doctor"], "argument --log-level: invalid choice: 'loud'"),
    (["doctor", "more"], "unrecognized arguments: more"),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Arguments that users may pass by mistake."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "text").write_text("mine\n")
    (folder / "empty").touch()
    (folder / "bytes").write_bytes(b"\xff\xfe\x00" * 100)
    (folder / "short").write_text('{"paged_kv_trace": 1}\nk 0\n')
    (folder / "public").write_text(PUBLIC)
    (folder / "folder").mkdir()
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text("{")
    (folder / "broken" / "model.safetensors").touch()
    (folder / "bare").mkdir()
    (folder / "bare" / "config.json").write_text("{}")
    shutil.copytree(embedded_model(), folder / "unknown")
    config = (folder / "unknown" / "config.json").read_text()
    (folder / "unknown" / "config.json").write_text(config.replace('"llama"', '"unheard_of"'))
    synthesize(Load(2, 100, 300), 1000, 10**9, folder / "trace")
    with open_store(folder / "store"):
        pass
    return folder


def tree(folder: Path) -> dict[str, bytes | None]:
    """All files outside the store, whose index writes at any time."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if path.parent.name != "store"
    }


@pytest.mark.parametrize(("argv", "message"), REFUSED, ids=range(len(REFUSED)))
def test_it_is_refused_in_words(
    argv: list[str],
    message: str,
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(files)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(files / "none"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), "utf-8"))
    # A thread would make its socket in that folder.
    monkeypatch.setattr(Publisher, "start", lambda self: None)
    before = tree(files)
    try:
        status = main(argv)
    except SystemExit as ended:
        status = int(ended.code or 0)
    captured = capsys.readouterr()
    assert status in (1, 2)
    assert message in captured.err
    assert "Errno" not in captured.err
    # What is wrong, and for an option where to look.
    assert len(captured.err.splitlines()) <= 2
    assert captured.out == ""
    assert tree(files) == before


def test_a_budget_that_is_too_small_is_told_in_options(capsys: Any) -> None:
    assert main([*GENERATE, "--max-kv-bytes", "10kB", "--max-tokens", "2"]) == 1
    error = capsys.readouterr().err
    enough = error.partition("raise --max-kv-bytes to at least ")[2].partition(", or")[0]
    assert "max_bytes" not in error
    assert main([*GENERATE, "--max-kv-bytes", enough.replace(",", ""), "--max-tokens", "2"]) == 0


def test_a_reader_that_goes_away_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    # Unbuffered text, as `generate` writes it, and the rest when a command has ended.
    for argv in ([*GENERATE, "--max-tokens", "2"], ["trace", "replay", "trace", "--json"]):
        output = os.fdopen(os.dup(writer), "w")
        monkeypatch.setattr(sys, "stdout", output)
        if argv[0] == "trace":
            monkeypatch.setattr(
                "paged_kv.commands.trace_command.run_replay", lambda _: print("{}") or 0
            )
        assert main(argv) == 141
        # The rest goes nowhere when Python ends.
        output.close()
        assert capsys.readouterr().err == ""
    os.close(writer)


@pytest.mark.parametrize(
    ("count", "noun", "said"),
    [(0, "block", "0 blocks"), (1, "block", "1 block"), (2048, "entry", "2,048 entries")],
)
def test_one_thing_is_not_told_as_several(count: int, noun: str, said: str) -> None:
    assert counted(count, noun) == said
