"""Tables are printed as `print` prints texts."""

import io

import pytest

from paged_kv.commands.plain_console import PlainConsole


class ClosedPipe(io.StringIO):
    def flush(self) -> None:
        raise BrokenPipeError


def test_markup_is_shown_and_a_closed_pipe_is_an_error() -> None:
    text = io.StringIO()
    PlainConsole(file=text).print("[red]a[/INST]")
    assert text.getvalue() == "[red]a[/INST]\n"
    with pytest.raises(BrokenPipeError):
        PlainConsole(file=ClosedPipe()).print("a")
