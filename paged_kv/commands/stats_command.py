"""The command `paged-kv stats`: shows the pools of a process or of a snapshot."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tqdm import tqdm

from paged_kv.commands.interrupts import raised
from paged_kv.extras import extra_module
from paged_kv.monitor.processes import ProcessView, running_process, running_processes
from paged_kv.options import examples, path, positive, require_writable, seconds

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_INTERVAL_S, _PLOT_S = 0.5, 10.0
_DESCRIPTION = """\
Where did my memory go? Shows the pages of a running process, or of a snapshot that `--json` wrote.
It can show every process of yours that uses this library; such a process opens no port, and writes
nothing for it until it is asked.
"""


def add_stats_parser(subparsers: Subparsers) -> None:
    """Register the subcommand "stats"."""
    parser = subparsers.add_parser(
        "stats",
        help="show the memory of a process's pages",
        description=_DESCRIPTION,
        **examples(
            "paged-kv stats --watch",
            "paged-kv stats --plot memory.svg --seconds 60",
            "paged-kv stats --json >snapshot.json",
        ),
    )
    parser.set_defaults(run=run_stats)
    parser.add_argument(
        "file", nargs="?", type=path, help="a snapshot (default: the running process)"
    )
    parser.add_argument("--pid", type=positive, help="which process to show, if there are several")
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--list", action="store_true", help="only list the processes")
    forms.add_argument("--json", action="store_true", help="print a snapshot as JSON")
    forms.add_argument("--prom", action="store_true", help="print Prometheus' text format")
    forms.add_argument("--watch", action="store_true", help="redraw the tables as they change")
    forms.add_argument(
        "--plot", type=path, metavar="OUT", help="plot memory over time to a .svg, .png or .html"
    )
    parser.add_argument(
        "--interval",
        type=seconds,
        metavar="S",
        help=f"seconds between samples of --watch and --plot (default: {_INTERVAL_S:g})",
    )
    parser.add_argument(
        "--seconds",
        type=seconds,
        metavar="S",
        help=f"how many seconds --plot samples (default: {_PLOT_S:g})",
    )


def run_stats(arguments: argparse.Namespace) -> int:
    """Show the statistics and return the exit status.

    Raises:
        OSError, ValueError: there is nothing to show; the message says why.
    """
    if arguments.file is not None and (arguments.pid or arguments.watch or arguments.list):
        raise ValueError("--pid, --watch and --list show running processes: leave out the file")
    if arguments.interval and not (arguments.watch or arguments.plot):
        raise ValueError("--interval is between samples: add --watch or --plot, or leave it out")
    if arguments.seconds and (arguments.file is not None or not arguments.plot):
        raise ValueError("--seconds is how long --plot samples a process: add it, without a file")
    if arguments.list:
        if arguments.pid:
            raise ValueError("--list shows all processes: leave out --pid")
        from paged_kv.commands.plain_console import PlainConsole
        from paged_kv.monitor.stats_table import process_list

        PlainConsole().print(process_list(_running_processes()))
    elif arguments.plot:
        plot = extra_module("paged_kv.monitor.stats_plot", "plot")
        plot.require_drawable(arguments.plot)
        require_writable(arguments.plot)
        plot.draw(_samples(arguments), arguments.plot)
        print(f"wrote {arguments.plot}", file=sys.stderr)
    elif arguments.watch:
        _watch(arguments)
    else:
        _print(_view(arguments), arguments)
    return 0


def _print(view: ProcessView, arguments: argparse.Namespace) -> None:
    if arguments.json:
        print(json.dumps(view.as_dict(), indent=2))
    elif arguments.prom:
        metrics = extra_module("paged_kv.monitor.prometheus_metrics", "metrics")
        sys.stdout.write(metrics.metrics_text(view).decode())
    else:
        from paged_kv.commands.plain_console import PlainConsole
        from paged_kv.monitor.stats_table import process_tables

        PlainConsole().print(process_tables(view))


def _running_processes() -> list[ProcessView]:
    if views := running_processes():
        return views
    raise ProcessLookupError(
        "no process of yours has a pool of pages: start one that uses paged_kv, such as `paged-kv "
        "generate` or `paged-kv server`, or name a snapshot"
    )


def _watch(arguments: argparse.Namespace) -> NoReturn:
    from paged_kv.commands.plain_console import PlainConsole
    from paged_kv.monitor.stats_table import watch

    pid = _view(arguments).pid
    with raised():  # the terminal gets back what it showed before
        watch(_looks(pid, arguments.interval or _INTERVAL_S), PlainConsole())
    raise ProcessLookupError(f"process {pid} has ended")


def _view(arguments: argparse.Namespace) -> ProcessView:
    """The process or snapshot that the arguments name.

    Raises:
        OSError, ValueError: there is none, or there are several processes.
    """
    if arguments.file is not None:
        return _saved_view(arguments.file)
    if arguments.pid is not None:
        return running_process(arguments.pid)
    views = _running_processes()
    if len(views) > 1:
        known = "".join(f"\n  --pid {view.pid}  {view.command}" for view in views)
        raise ValueError(f"{len(views)} processes have pools; choose one:{known}")
    return views[0]


def _saved_view(path: Path) -> ProcessView:
    try:
        content = json.loads(path.read_text())
    except ValueError:
        raise ValueError(f"{path} is no snapshot, which `paged-kv stats --json` writes") from None
    return ProcessView.from_dict(content)


def _samples(arguments: argparse.Namespace) -> Iterable[ProcessView]:
    if arguments.file is not None:
        return [_saved_view(arguments.file)]
    interval_s = arguments.interval or _INTERVAL_S
    samples = int((arguments.seconds or _PLOT_S) / interval_s) + 1
    looks = islice(_looks(_view(arguments).pid, interval_s), samples)
    return tqdm(looks, "plot", samples, leave=False, unit=" samples", disable=None)


def _looks(pid: int, interval_s: float) -> Iterator[ProcessView]:
    """Views of a process until it ends."""
    due = time.monotonic()
    while True:
        try:
            yield running_process(pid)
        except ProcessLookupError:
            return
        due = max(due + interval_s, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))
