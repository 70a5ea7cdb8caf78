"""The command `paged-kv doctor`."""

import argparse

from paged_kv.commands.arguments import examples, path


def add_doctor_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "doctor",
        help="run every kernel on this device, and check its results",
        description=(
            "Says which backend is active and why. Runs every kernel once on this device, and "
            "compares its results with attention in float64. If one is wrong, the backend is "
            "disabled from then on: plain operations serve everything. "
            "Prints the verdict, all that is wrong, and a line for each operation. "
            "PAGED_KV_BACKEND selects a backend, PAGED_KV_ISA the instruction set of the CPU "
            "kernels. Exit status 1 if a kernel is wrong."
        ),
        **examples(
            "paged-kv doctor",
            "paged-kv doctor --verbose",
            "paged-kv doctor --report report.md",
            "paged-kv doctor --reset",
            "PAGED_KV_ISA=generic paged-kv doctor",
        ),
    )
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="first print a line for each check, as soon as it is known: the last one tells where "
        "a device hangs",
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--report",
        type=path,
        metavar="FILE",
        help="also run a quick `paged-kv bench`, and write all that an issue needs to a file: the "
        "results, chip, memory, versions and the log, without names of users, hosts or folders",
    )
    choice.add_argument(
        "--reset",
        action="store_true",
        help="use all backends again, and examine nothing",
    )
    parser.set_defaults(run=run_doctor)


def run_doctor(arguments: argparse.Namespace) -> int:
    """Examine, report or reset, and return the exit status."""
    # Imported here: all of it needs mlx, and --help does not.
    from paged_kv.integrations.doctor.examination import examine
    from paged_kv.integrations.doctor.report import progress, write_report
    from paged_kv.kernels.backends import forget_verdicts

    if arguments.reset:
        forget_verdicts()
        print("no backend is disabled any more")
        return 0
    if arguments.report:
        return write_report(arguments.report, verbose=arguments.verbose)
    with progress(verbose=arguments.verbose) as tell:
        found = examine(tell)
    print(found.summary())
    return 1 if found.wrong else 0
