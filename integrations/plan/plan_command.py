"""The command `paged-kv plan`: whether a model and its sessions fit, before it is loaded."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from paged_kv.checks import counted, format_size, parse_size
from paged_kv.options import (
    ModelOptions,
    add_options,
    embedded_model,
    examples,
    not_loaded,
    parsed_options,
    positive,
)
from paged_kv.pool.options import POOL_OPTIONS

if TYPE_CHECKING:
    from paged_kv.integrations.plan.memory_plan import MemoryPlan, Planner


MODEL_OPTIONS = ModelOptions()


def add_plan_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "plan",
        help="say whether a model and its sessions fit into memory, before it is loaded",
        description="Says what weights, a prompt step and sessions take, and whether that fits "
        "into this machine's memory, or another's. Prompt steps are measured through the first "
        "layers; other weights stay on disk. Exit status 1 if it does not fit, with what to "
        "change and what each change gives. Without --model it plans for stdlib-llama.",
        **examples(
            "paged-kv plan --model mlx-community/Llama-3.2-1B-Instruct-4bit",
            "paged-kv plan --model MODEL --context 131072 --sessions 4 --page-format q4",
            "paged-kv plan --model MODEL --draft-model SMALLER --memory 16GiB --json",
        ),
    )
    add_options(parser, MODEL_OPTIONS)
    parser.add_argument(
        "--context",
        type=positive,
        default=8192,
        metavar="N",
        help="tokens of a session (default: 8192)",
    )
    parser.add_argument(
        "--sessions",
        type=positive,
        default=1,
        metavar="N",
        help="sessions held at once (default: 1)",
    )
    add_options(parser, POOL_OPTIONS, "page_format", "read_tokens", "offload")
    parser.add_argument(
        "--prefill-step-size",
        type=positive,
        default=2048,
        metavar="N",
        help="tokens of a prompt step (default: 2048)",
    )
    parser.add_argument(
        "--memory",
        type=parse_size,
        metavar="BYTES",
        help="plan for this memory, such as 16GiB, instead of this machine's: Metal's recommended "
        "working set, the CUDA device's memory, or on a CPU the smaller of the machine's memory "
        "and its control group's limit",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    # Imported here because loading mlx-lm takes seconds.
    from paged_kv.integrations.plan.memory_plan import Planner, Workload
    from paged_kv.kernels.pages.memory import device_bytes

    options = parsed_options(arguments, POOL_OPTIONS)
    models = _models(parsed_options(arguments, MODEL_OPTIONS))
    planner = Planner(models, arguments.memory or device_bytes())
    plan = planner.plan(
        Workload(
            arguments.context,
            arguments.sessions,
            str(options.page_format),
            arguments.prefill_step_size,
            options.read_tokens,
            None if options.offload is None else str(options.offload),
        )
    )
    if arguments.json:
        print(json.dumps(_as_json(planner, plan), indent=2))
    else:
        _print(planner, plan)
    return 0 if plan.fits else 1


def _models(options: ModelOptions) -> list[Any]:
    """The models, whose weights stay on disk until they are used.

    Raises:
        OSError: one is not there, or its folder is incomplete.
        ValueError: mlx-lm cannot load one.
    """
    import mlx.core as mx
    from mlx_lm import load

    from paged_kv.integrations.speculation.draft_models import load_draft_model

    options.require_models()
    named = options.model or embedded_model()
    try:
        model, tokenizer = load(named, lazy=True)[:2]
    except Exception as error:
        raise not_loaded("--model", named, error) from error
    drafting = load_draft_model(options.draft_model, model, named, tokenizer, lazy=True)
    models = [model] if drafting is None else [model, drafting]
    if options.dtype is not None:
        for each in models:
            each.set_dtype(getattr(mx, options.dtype))
    return models


def _as_json(planner: Planner, plan: MemoryPlan) -> dict[str, Any]:
    changes = [] if plan.fits else planner.changes(plan)
    return plan.as_dict() | {
        "changes": [
            {"change": name, "saves": plan.needed - changed.needed, "fits": changed.fits}
            for name, changed in changes
        ]
    }


def _print(planner: Planner, plan: MemoryPlan) -> None:
    from rich.table import Table

    from paged_kv.commands.plain_console import PlainConsole

    workload = plan.workload
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    sessions = counted(workload.sessions, "session")
    each = f"{format_size(plan.session)} each" if workload.sessions > 1 else ""
    parts = {"pages": plan.pages, "windows": plan.windows, "states": plan.states}
    of_parts = ", ".join(f"{name} {format_size(size)}" for name, size in parts.items() if size)
    step = f"at the end of {workload.context:,} tokens"
    slabs = "of two formats, at most" if plan.slack else ""
    for row in (
        ("weights", plan.weights, ""),
        (f"prompt step of {min(workload.step, workload.context):,}", plan.prompt_step, step),
        (f"{sessions}, {workload.page_format}", plan.all_sessions, f"{each} ({of_parts})".strip()),
        *([("unused in slabs", plan.slack, slabs)] if plan.slack else []),
        ("left to the system", plan.reserve, ""),
        ("all", plan.needed, f"of {format_size(plan.memory)}"),
    ):
        table.add_row(row[0], format_size(row[1]), row[2])
    PlainConsole(soft_wrap=True).print(table)
    print()
    if plan.fits:
        print(f"fits, as would {_what_fits(plan)}")
        return
    would = f", but these would: {_what_fits(plan)}" if plan.room >= plan.session else ""
    print(f"does not fit{would}. What changes give:")
    for change, changed in planner.changes(plan):
        saved = format_size(max(0, plan.needed - changed.needed))
        fits = "fits" if changed.fits else f"{counted(changed.most_sessions, 'session')} would fit"
        print(f"  {change}: {saved} less, {fits}")


def _what_fits(plan: MemoryPlan) -> str:
    """How many sessions of this context fit, and which context of so many sessions."""
    words = [f"{counted(plan.most_sessions, 'session')} of {plan.workload.context:,} tokens"]
    whose = "one" if plan.workload.sessions == 1 else f"{plan.workload.sessions:,}"
    if plan.longest is None:
        words.append(f"{whose} of any length")
    elif plan.longest:
        words.append(f"{whose} of {plan.longest:,} tokens")
    return " or ".join(words)
