"""`paged-kv completion` prints scripts that shells accept, with the options of every command."""

import subprocess

import pytest

from paged_kv.command_line import main

pytest.importorskip("shtab", reason="needs the extra completion")


def test_bash_completes_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", "bash"])
    ask = "\nCOMP_WORDS=(paged-kv generate --max-k); COMP_CWORD=2; _shtab_paged_kv; "
    script = capsys.readouterr().out + ask + "echo ${COMPREPLY[@]}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["--max-kv-bytes"]
