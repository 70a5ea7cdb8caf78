"""An interrupt ends every command at once, with status 130 and without a word.

These tests run commands as users do, and send real signals. The server's own handling of signals is
tested in tests/server/test_lifecycle.py.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE_S
from tests.support.shown_process import shown_process

MODULE = [sys.executable, "-m", "paged_kv"]
PROGRAMS = [[str(Path(sys.executable).with_name("paged-kv"))], MODULE]
GENERATE = ["generate", "--prompt", "def f(x):", "--max-tokens", "8"]
# Without a line about what would make the CPU quicker, which differs from machine to machine.
QUIET = ["--log-level", "error"]

# Interrupts the process once, at the first event of Python's auditing that has a text in its
# arguments.
INTERRUPTER = """
import _signal, os, sys

awaited, text = os.environ["INTERRUPT_AT"].split(" ")

def look(event, arguments):
    global awaited
    if event == awaited and text in str(arguments):
        awaited = None
        _signal.raise_signal(2)  # SIGINT. The command is to import signal itself.

sys.addaudithook(look)
"""


@pytest.fixture(scope="module", autouse=True)
def _interruptible() -> Iterator[None]:
    """Let processes take interrupts, also if these tests run in the background, which ignores
    them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def started(argv: list[str], folder: Path, **environment: str) -> subprocess.Popen[str]:
    """A process that runs in a folder and publishes nothing to others."""
    pipe = subprocess.PIPE
    environment |= {"XDG_RUNTIME_DIR": str(folder)}
    return subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        text=True,
        cwd=folder,
        env=os.environ | environment,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """The status of a process, and what it wrote to standard output and standard error."""
    try:
        output, errors = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()  # one that hangs
    return process.returncode, output, errors


def interrupted(argv: list[str], event: str, folder: Path) -> tuple[int, str, str]:
    """As `ended`, of a process that is interrupted at an event."""
    (folder / "path").mkdir()
    (folder / "path" / "sitecustomize.py").write_text(INTERRUPTER)
    path = os.pathsep.join([str(folder / "path"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return ended(started(argv, folder, INTERRUPT_AT=event, PYTHONPATH=path))


@pytest.mark.parametrize("program", PROGRAMS, ids=["script", "module"])
@pytest.mark.parametrize("name", ["signal", "paged_kv.command_line", "paged_kv.checks"])
def test_the_first_lines_and_imports_end(program: list[str], name: str, tmp_path: Path) -> None:
    event = f"import '{name}'"  # The quotes are those of a whole name.
    assert interrupted([*program, *GENERATE], event, tmp_path) == (130, "", "")


@pytest.mark.slow
@pytest.mark.parametrize("event", ["import 'mlx.core'", "open config.json"])
def test_loading_ends(event: str, tmp_path: Path) -> None:
    assert interrupted([*MODULE, *GENERATE], event, tmp_path) == (130, "", "")


@pytest.mark.slow
def test_a_prompt_is_stored_when_its_text_is_interrupted(tmp_path: Path) -> None:
    command = [*MODULE, *QUIET, "generate", "--prompt", "x = 1\n" * 80, "--store", "pages"]
    process = started([*command, "--max-tokens", "1000000"], tmp_path)
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    status, _, errors = ended(process)
    assert (status, errors) == (130, "")
    status, _, errors = ended(started([*command, "--max-tokens", "2"], tmp_path))
    assert status == 0
    assert "of them cached" in errors


@pytest.mark.slow
def test_a_terminal_is_as_before(runtime: Path) -> None:
    pty = pytest.importorskip("pty")
    with shown_process(runtime):
        pid, terminal = pty.fork()
        if pid == 0:
            os.environ |= {"XDG_RUNTIME_DIR": str(runtime), "TERM": "xterm"}
            os.execv(MODULE[0], [*MODULE, "stats", "--watch", "--interval", "0.05"])
        drawn = b""
        while b"process " not in drawn:
            drawn += os.read(terminal, 1 << 16)
        os.write(terminal, b"\x03")  # Ctrl-C
        drawn = b"".join(iter(lambda: _read(terminal), b""))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(terminal)
    assert status == 130
    assert b"\x1b[?1049l" in drawn  # Leaves the alternate screen ...
    assert b"\x1b[?25h" in drawn  # ... and shows the cursor.
    assert b"Traceback" not in drawn


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # Linux says so when the last process has closed the terminal.
        return b""


def run_python(script: str, *beginning: str) -> tuple[int, str, str]:
    """As `ended`, of a script in a process that interrupts end."""
    head = (
        "import signal\n"
        "from paged_kv.commands.interrupts import end_at_interrupts, raised\n"
        "def interrupt():\n"
        # To this thread. os.kill() may choose the other one, and then Python raises later.
        "    signal.raise_signal(signal.SIGINT)\n"
        "end_at_interrupts()\n"
    )
    return ended(started([*beginning, sys.executable, "-c", head + script], Path.cwd()))


CLEAN_UP = """
with raised():
    try:
        interrupt()
    finally:
        print("cleaned up", flush=True)
        {then}
"""


def test_the_first_interrupt_lets_clean_up_and_the_second_ends() -> None:
    _, output, errors = run_python(CLEAN_UP.format(then="pass"))
    assert output == "cleaned up\n"
    assert errors.endswith("\nKeyboardInterrupt\n")
    assert run_python(CLEAN_UP.format(then="interrupt()")) == (130, "cleaned up\n", "")


def test_a_command_in_the_background_goes_on() -> None:
    """Shells start it with SIGINT ignored."""
    ignoring = ("sh", "-c", 'trap "" INT; exec "$@"', "sh")
    assert run_python("interrupt()\nprint('goes on')", *ignoring) == (0, "goes on\n", "")
