"""The command `paged-kv doctor`."""

import argparse

from paged_kv.commands.cache_options import examples


def add_doctor_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "doctor",
        help="run every kernel once on this device and check its results",
        description=(
            "Says which backend is active and why, compiles and runs every kernel once on this "
            "device, and compares its results with attention in float64. PAGED_KV_BACKEND selects "
            "another backend, PAGED_KV_ISA another instruction set of the CPU kernels. Exit "
            "status 1 if a kernel is wrong."
        ),
        **examples("paged-kv doctor", "PAGED_KV_ISA=generic paged-kv doctor"),
    )
    parser.set_defaults(run=run_doctor)


def run_doctor(_: argparse.Namespace) -> int:
    """Print the table and return the exit status."""
    # Imported here: the checks need mlx, and --help does not.
    from paged_kv.commands.doctor import examine

    return examine()
