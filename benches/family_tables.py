"""Lists the model files by what they get from pages."""

from typing import Any

from benches.table_cells import quoted

Figures = dict[str, Any]

_GETS = {
    "paged": "Attention reads pages",
    "decode": "Attention reads pages while decoding",
    "gather": "Pages, gathered for attention of the model's own",
    "own": "No pages, caches of mlx-lm only",
    "fails": "Fails on pages",
    "not run": "Not run",
}


def model_families(figures: Figures) -> str:
    """The model files, grouped by what they get, and what is not as in most of them."""
    files: dict[str, Figures] = figures["files"]
    lines = []
    for gets, title in _GETS.items():
        names = [_with_reason(name, of) for name, of in files.items() if of["gets"] == gets]
        if names:
            lines.append(f"- **{title}** ({len(names)}): {', '.join(names)}")
    return "\n".join([*lines, "", *_kept(files), *_exceptions(files)])


def _with_reason(name: str, entry: Figures) -> str:
    """A file, why it was gathered or not run, or which of mlx-lm's caches it has in place of
    pages."""
    caches = entry["mlx_lm_caches"] if entry["gets"] == "own" else {}
    reason = entry.get("reason") or quoted(caches)
    return f"`{name}` ({reason})" if reason else f"`{name}`"


def _kept(files: dict[str, Figures]) -> list[str]:
    """Which files keep which of mlx-lm's caches beside pages."""
    beside: dict[str, list[str]] = {}
    for name, entry in files.items():
        for cache in entry.get("mlx_lm_caches", {}) if entry.get("paged_layers") else ():
            beside.setdefault(cache, []).append(name)
    return [
        f"- Layers that keep mlx-lm's {cache} beside pages ({len(names)}): {quoted(names)}"
        for cache, names in sorted(beside.items())
    ]


def _exceptions(files: dict[str, Figures]) -> list[str]:
    """How the tokens compare with mlx-lm's: how many are equal, and which are not."""
    ran = {name: entry for name, entry in files.items() if entry["gets"] != "not run"}
    lines = []
    labels = {
        "alone": "Tokens of prompts alone: equal to mlx-lm's",
        "batch": "Tokens of a ragged batch: equal to mlx-lm's batch and to its prompts alone",
    }
    for key, label in labels.items():
        others: dict[str, list[str]] = {}
        for name, entry in ran.items():
            if entry[key] != "equal":
                others.setdefault(entry[key], []).append(name)
        equal = len(ran) - sum(map(len, others.values()))
        lines.append(f"- {label} in {equal} of {len(ran)} files")
        lines += [f"  - {what}: {quoted(names)}" for what, names in sorted(others.items())]
    unsteady = [name for name, entry in ran.items() if not entry["stock_repeats"]]
    if unsteady:
        lines.append(f"- mlx-lm itself gives other tokens when asked again: {quoted(unsteady)}")
    return lines


_VISION_GETS = {
    "paged": "Attention reads pages",
    "gather": "Pages, gathered for attention of the model's own",
    "refused": "Refused: paged_kv does not know a class of the model's caches",
    "not built": "Not run: no small model of it was built",
}


def vision_families(figures: Figures) -> str:
    """The folders of mlx-vlm, grouped by what they get, and whose tokens are not equal."""
    folders: dict[str, Figures] = figures["folders"]
    lines = [f"mlx-vlm {figures['mlx_vlm']}.", ""]
    for gets, title in _VISION_GETS.items():
        names = [name for name, entry in folders.items() if entry["gets"] == gets]
        lines.append(f"- **{title}** ({len(names)}): {quoted(names)}")
    ran = {name: entry for name, entry in folders.items() if "alone" in entry}
    lines.append("")
    for key, label in (("alone", "prompts alone"), ("batch", "a batch")):
        others: dict[str, list[str]] = {}
        for name, entry in ran.items():
            others.setdefault(entry[key], []).append(name)
        equal = others.pop("equal", [])
        lines.append(f"- Tokens of {label}: equal to mlx-vlm's in {len(equal)} of {len(ran)}")
        lines += [f"  - {what}: {quoted(names)}" for what, names in sorted(others.items())]
    return "\n".join(lines)
