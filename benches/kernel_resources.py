"""What NVIDIA's compiler makes of the decode kernels: python -m benches.kernel_resources

No GPU is needed, and nothing here is a time: NVRTC compiles each variant for an H100 (sm_90), and
its messages and the disassembled machine code are counted. It needs `pip install -e '.[nvrtc]'`.

A multiprocessor hides the latency of memory if as many bytes are on their way as its bandwidth
times the latency (Little's law). What a kernel asks for at once is counted in the two loops that
read pages, of keys and of values: loads that are issued before an instruction needs the first. A
row of "decode" is one variant, for heads of 128:

    registers, shared_bytes     of a thread, and of a block
    instructions                of the whole kernel
    tile_instructions           of the two loops, for a tile of 32 tokens
    warps                       that a multiprocessor runs: 64K registers, 227 KiB, 64 warps
    key_bytes, value_bytes      of pages that a warp asks for at once in each loop

A row of "devices" is arithmetic on published figures: the bytes that must be on their way for each
multiprocessor or core. Their latency under load is assumed: 600 ns for all.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

from benches.cuda_texts import kernel_text, module
from benches.results_file import write_result
from tests.support.gpu_on_cpu.nvrtc import compiled, why_not

DIM, TILE, LANES = 128, 32, 32
FORMATS = {
    "fp16": (16, ["HAS_FLOATS"]),
    "q8": (8, ["HAS_Q8", "HAS_CODES"]),
    "q4": (4, ["HAS_Q4", "HAS_Q5", "HAS_CODES"]),
}
QUERY_HEADS = (4, 8)  # for each KV head
REGISTERS, REGISTER_UNIT = 64 << 10, 256  # of a multiprocessor, given to warps in such units
SHARED_BYTES, SHARED_UNIT, SYSTEM_BYTES = 227 << 10, 128, 1 << 10  # the last of each block
MOST_WARPS = 64
LATENCY = 600e-9
# Bytes a second, and multiprocessors or cores.
DEVICES = {
    "H100 SXM": (3.35e12, 132),
    "H200": (4.8e12, 132),
    "M3 Max": (400e9, 40),
    "M5": (153e9, 10),
}

Row = dict[str, Any]
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?(.*?);")
_LABEL = re.compile(r"^\.(L_x_\d+):")
_BRANCH = re.compile(r"^BRA .*`\(\.(L_x_\d+)\)")
_LOAD = re.compile(r"^LD\.E(?:\.(\w+))? R(\d+)")  # of a generic address: pages, not other inputs
WORDS = {"128": 4, "64": 2}


def disassembled(code: bytes) -> str:
    """The text of machine code."""
    try:
        (program,) = [
            each for each in files("nvidia-cuda-nvdisasm") or () if each.stem == "nvdisasm"
        ]
    except PackageNotFoundError:
        raise SystemExit("nvdisasm is missing: pip install -e '.[nvrtc]'") from None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(code)
        command = [str(program.locate()), "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def instructions(text: str) -> tuple[list[str], dict[str, int]]:
    """All instructions, without predicates, and the places of labels."""
    found: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if (label := _LABEL.match(line)) is not None:
            labels[label[1]] = len(found)
        elif (instruction := _INSTRUCTION.search(line)) is not None:
            found.append(instruction[1].strip())
    return found, labels


def page_loops(text: str) -> list[list[str]]:
    """The innermost loops that read pages, in the order of the program."""
    found, labels = instructions(text)
    loops = [
        (labels[branch[1]], at + 1)
        for at, each in enumerate(found)
        if (branch := _BRANCH.match(each)) is not None and labels[branch[1]] <= at
    ]
    inner = [
        (a, b)
        for a, b in sorted(loops)
        if not any(a <= c and d <= b for c, d in loops if (c, d) != (a, b))
    ]
    bodies = [found[begin:end] for begin, end in inner]
    return [body for body in bodies if any(map(_LOAD.match, body))]


def loads(body: list[str]) -> int:
    """Those of numbers: only scales are loads of 16 bits."""
    return sum(load is not None and load[1] != "U16" for load in map(_LOAD.match, body))


def loads_at_once(body: list[str]) -> int:
    """The most loads of numbers that are issued before an instruction uses the first."""
    waiting: list[set[int]] = []  # the registers of each
    most = 0
    for each in body:
        used = {int(number) for number in re.findall(r"\bR(\d+)", each)}
        waiting = [registers for registers in waiting if not registers & used]
        if (load := _LOAD.match(each)) is not None and load[1] != "U16":
            first = int(load[2])
            waiting.append(set(range(first, first + WORDS.get(load[1], 1))))
        most = max(most, len(waiting))
    return most


def warps(registers: int, shared: int, of_block: int) -> int:
    """Warps of a kernel that a multiprocessor runs at once."""
    of_warp = -(-registers * LANES // REGISTER_UNIT) * REGISTER_UNIT
    by_shared = SHARED_BYTES // (-(-(shared + SYSTEM_BYTES) // SHARED_UNIT) * SHARED_UNIT)
    return of_block * min(REGISTERS // of_warp // of_block, by_shared, MOST_WARPS // of_block)


def decode() -> Iterator[Row]:
    for heads in QUERY_HEADS:
        for name, (bits, flags) in FORMATS.items():
            shape = module("tuning").decode_shape(
                "cuda", 1, heads, 1, (DIM, DIM), 1 << 15, bases=1 + (bits < 16)
            )
            sizes = {"ROWS": shape.rows, "BLOCKS": shape.blocks, "PARTS": shape.parts}
            sizes["AHEAD"] = module("tuning").values_ahead("cuda", DIM)
            text = kernel_text("decode", [*flags, "PARTIAL", "STEP"], K_DIM=DIM, V_DIM=DIM, **sizes)
            code, log = compiled(text, "sm_90")
            assert code, log
            registers, shared = (
                int(number) for number in re.findall(r"Used (\d+) reg.* (\d+) bytes smem", log)[0]
            )
            machine = disassembled(code)
            keys, values = page_loops(machine)
            # A lane of two takes every second 16 bytes of two keys; a value is read at once.
            key_loads, tokens = loads_at_once(keys), loads_at_once(values)
            of_keys = DIM * bits / 128 / loads(keys)
            yield {
                "format": name,
                "query_heads": heads,
                "registers": registers,
                "shared_bytes": shared,
                "instructions": len(instructions(machine)[0]),
                "tile_instructions": round(
                    len(keys) * of_keys + len(values) * TILE / loads(values)
                ),
                "warps": warps(registers, shared, shape.parts * shape.blocks),
                "key_bytes": key_loads * 16 * LANES,
                "value_bytes": tokens * DIM * bits // 8,
            }
            print(name, heads, flush=True)


def devices() -> list[Row]:
    return [
        {"device": name, "bytes": round(bandwidth * LATENCY / cores)}
        for name, (bandwidth, cores) in DEVICES.items()
    ]


def main() -> None:
    if reason := why_not():
        raise SystemExit(reason)
    write_result("kernel_resources", {"decode": list(decode()), "devices": devices()})


if __name__ == "__main__":
    main()
