"""The command `paged-kv doctor`."""

import argparse

from paged_kv.options import examples, path


def add_doctor_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "doctor",
        help="say which kernels are right on this device, and check them",
        description=(
            "Says which backend is active and why, which of its kernels were checked on this "
            "device, and what is wrong with others. A kernel is checked before its first use, "
            "against attention in float64; if one is wrong, plain operations serve everything. "
            "--again runs every kernel now, and prints a line for each as soon as it is known: the "
            "last one tells where a device hangs. "
            "PAGED_KV_BACKEND selects a backend, PAGED_KV_ISA the instruction set of the CPU "
            "kernels. Exit status 1 if a kernel is wrong."
        ),
        **examples(
            "paged-kv doctor",
            "paged-kv doctor --again",
            "paged-kv doctor --report report.md",
            "paged-kv doctor --reset",
            "PAGED_KV_ISA=generic paged-kv doctor --again",
        ),
    )
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="also list what is right",
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--again",
        action="store_true",
        help="check every kernel now, and let that hold in the place of what was known",
    )
    choice.add_argument(
        "--report",
        type=path,
        metavar="FILE",
        help="as --again, run a quick `paged-kv bench`, and write all that an issue needs to a "
        "file: the results, what was known, chip, memory, versions and the log, without names of "
        "users, hosts or folders",
    )
    choice.add_argument(
        "--reset",
        action="store_true",
        help="forget what is known: kernels are checked before their next use",
    )
    parser.set_defaults(run=run_doctor)


def run_doctor(arguments: argparse.Namespace) -> int:
    """Tell, examine, report or reset, and return the exit status."""
    # Imported here: all of it needs mlx, and --help does not.
    from paged_kv.integrations.doctor.examination import examine, known, write_report
    from paged_kv.kernels.pages.verdicts import forget_verdicts

    if arguments.reset:
        forget_verdicts()
        print("kernels are checked before their next use")
        return 0
    if arguments.report:
        return write_report(arguments.report)
    if arguments.again:
        examine()
    are_right, text = known(verbose=arguments.verbose)
    print(text)
    return 0 if are_right else 1
