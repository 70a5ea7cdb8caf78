"""The CUDA kernels on a real NVIDIA GPU: are they right, and how much of its bandwidth do they use?

    pip install cupy-cuda12x numpy     # and nothing else: MLX need not be there
    python -m benches.cuda_kernels [--quick] [--output FILE]

Decode is compared with dense attention in float32 over the numbers that the pages hold, and its
time with a copy on the same device, in turns: GB/s of keys and values read, over GB/s read and
written by the copy. Prefill is compared likewise, and with PyTorch's scaled_dot_product_attention
where there is a PyTorch. Launches are captured in graphs, as MLX does, so that no time of Python's
counts. What was measured goes to a file of JSON.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benches.cuda_texts import SLABS, kernel_text, module

KV_HEADS, RATIO, DIM, PAGE = 8, 4, 128, 256
STRIDE, ROW_FIELDS = 1 << 16, 7
BATCHES = (1, 8, 32)
LENGTHS = (1 << 10, 1 << 12, 1 << 14, 1 << 15, 1 << 16)
BITS = {"fp16": 16, "q4": 4}  # of a plane of codes, without fifth bits
KINDS = {"fp16": (16, 16), "q4": (5, 4)}  # of keys and values, in kernels/gpu/pages.h
FLAGS = {"fp16": ["HAS_FLOATS"], "q4": ["HAS_Q4", "HAS_Q5", "HAS_CODES"]}
# Words of a token's fifth bits, and its scales: of keys, of values.
SCALES = (DIM // 16, DIM // 128), (0, DIM // 64)
MOST_BYTES = 60 << 30  # of pages; larger combinations are left out
TOLERANCE = 4e-3  # float16 outputs of size 1
ROUNDS, CAPTURED = 10, 5

PARAMETERS = {
    "slab_stride": 0,
    "table_stride": 1,
    "kv_heads": 2,
    "steps": 3,
    "ratio": 4,
    "scale": 5,
}
PARAMETERS |= {"causal": 7, "splits": 8, "split_tiles": 9, "q_heads": 12}


@dataclass
class Pages:
    """One slab with pages of one format, whose entries are 0, 1, 2, ..."""

    memory: Any  # uint16 [pages, words]
    page_format: str

    @property
    def is_quantised(self) -> bool:
        return self.page_format != "fp16"

    @property
    def offsets(self) -> list[int]:
        """Words of a page, and where keys' scales, values, values' scales and keys' centres
        begin."""
        tokens = KV_HEADS * PAGE
        codes = tokens * DIM * BITS[self.page_format] // 16
        if not self.is_quantised:
            return [2 * codes, 0, codes, codes, 0]
        key_scales, value_scales = map(sum, SCALES)
        centres = codes + tokens * key_scales
        values = centres + KV_HEADS * DIM
        return [values + codes + tokens * value_scales, codes, values, values + codes, centres]

    def layouts(self, cupy: Any) -> Any:
        *offsets, centres = self.offsets
        fields = [*offsets, *KINDS[self.page_format], centres]
        return cupy.asarray(np.array([fields] * SLABS, np.int32))


class Bench:
    """The kernels on one GPU."""

    def __init__(self, cupy: Any) -> None:
        self.cupy = cupy
        self.tuning = module("tuning")
        self._made: dict[tuple[Any, ...], Any] = {}

    def kernel(self, operation: str, flags: Sequence[str], **constants: int) -> Any:
        key = (operation, *flags, *constants.items())
        if key not in self._made:
            made = self.cupy.RawModule(
                code=kernel_text(operation, flags, **constants),
                options=("--std=c++17", "--device-as-default-execution-space"),
                backend="nvrtc",
            )
            self._made[key] = made.get_function(operation)
        return self._made[key]

    def strides(self, array: Any) -> Any:
        counts = [stride // array.itemsize for stride in array.strides]
        return self.cupy.asarray(np.array(counts, np.int64))

    def params(self, **given: float) -> Any:
        numbers = np.zeros(16, np.int32)
        fixed = {"slab_stride": STRIDE, "kv_heads": KV_HEADS, "ratio": RATIO}
        fixed |= {"q_heads": KV_HEADS * RATIO, "causal": 1}
        for name, number in (fixed | given).items():
            bits = np.float32(number).view(np.int32) if isinstance(number, float) else number
            numbers[PARAMETERS[name]] = bits
        return self.cupy.asarray(numbers)

    def tables(self, batch: int, length: int) -> Any:
        """Rows of that many tokens, whose pages are mixed."""
        count = -(-length // PAGE)
        entries = np.random.default_rng(0).permutation(batch * count).reshape(batch, count)
        fields = np.zeros((batch, ROW_FIELDS), np.int32)
        fields[:, 0] = length
        return self.cupy.asarray(np.concatenate([fields, entries.astype(np.int32)], 1))

    def of_pages(self, pages: Pages, tables: Any, params: Any) -> list[Any]:
        before = self.cupy.zeros(8, self.cupy.int32)
        return [*[pages.memory] * SLABS, pages.layouts(self.cupy), tables, params, before]

    def filled(self, page_format: str, batch: int, length: int, tables: Any) -> Pages:
        """Pages of normal numbers, which the write kernel has written, or of random codes."""
        count = batch * -(-length // PAGE)
        empty = Pages(None, page_format)
        memory = self.cupy.zeros((count, empty.offsets[0]), self.cupy.uint16)
        pages = Pages(memory, page_format)
        if pages.is_quantised:
            self._fill_with_codes(pages)
            return pages
        step = min(length, 4096)
        done = self.cupy.zeros(8, self.cupy.int32)
        write = self.kernel("write", [], K_DIM=DIM, V_DIM=DIM)
        for end in range(step, length + step, step):
            end = min(end, length)
            shape = (batch, KV_HEADS, step, DIM)
            new = [self.cupy.random.standard_normal(shape, dtype=np.float32) for _ in range(2)]
            keys, values = (each.astype(np.float16) for each in new)
            rows = tables.copy()
            rows[:, 0] = end
            params = self.params(table_stride=tables.shape[1], steps=step)
            arguments = [keys, self.strides(keys), values, self.strides(values)]
            arguments += [*self.of_pages(pages, rows, params), done]
            write((-(-step // 4), KV_HEADS, 2 * batch), (128, 1, 1), tuple(arguments))
        return pages

    def _fill_with_codes(self, pages: Pages) -> None:
        """Random codes, whose scale makes their numbers about as large as normal ones, and centres
        that are half as large."""
        memory, sides = pages.memory, zip(pages.offsets[1::2], SCALES, strict=True)
        memory[...] = self.cupy.random.randint(0, 1 << 16, memory.shape, dtype=np.uint16)
        for first, (fifths, scales) in sides:
            end = first + KV_HEADS * PAGE * (fifths + scales)
            rows = memory[:, first:end].reshape(-1, KV_HEADS * PAGE, fifths + scales)
            rows[..., fifths:] = int(np.float16(0.1 if fifths else 0.2).view(np.uint16))
            memory[:, first:end] = rows.reshape(len(memory), -1)
        shape = (len(memory), KV_HEADS * DIM)
        centres = 0.5 * self.cupy.random.standard_normal(shape, dtype=np.float32)
        first = pages.offsets[4]
        memory[:, first : first + shape[1]] = centres.astype(np.float16).view(np.uint16)

    def decode(
        self, pages: Pages, tables: Any, length: int, *, writes: bool
    ) -> tuple[Any, Any, Callable[[], None]]:
        """Queries, where the output comes, and what computes it, and writes the last token: only to
        pages of 16 bits."""
        cupy, batch, heads = self.cupy, tables.shape[0], KV_HEADS * RATIO
        bases = 1 + pages.is_quantised
        shape = self.tuning.decode_shape(
            "cuda", batch, heads, KV_HEADS, (DIM, DIM), length, bases=bases
        )
        params = self.params(
            table_stride=tables.shape[1],
            steps=1,
            scale=DIM**-0.5 * math.log2(math.e),
            splits=shape.splits,
            split_tiles=shape.tiles,
        )
        is_whole = shape.splits == 1
        flags = [*FLAGS[pages.page_format], "WHOLE" if is_whole else "PARTIAL"]
        flags += ["STEP"] if writes else []
        sizes = {"ROWS": shape.rows, "BLOCKS": shape.blocks, "PARTS": shape.parts}
        sizes["AHEAD"] = self.tuning.values_ahead("cuda", DIM)
        read = self.kernel("decode", flags, K_DIM=DIM, V_DIM=DIM, **sizes)
        merge = self.kernel("merge", [], V_DIM=DIM)
        queries, keys, values = (
            cupy.random.standard_normal((batch, each, 1, DIM), dtype=np.float32).astype(np.float16)
            for each in (heads, KV_HEADS, KV_HEADS)
        )
        own = [queries, keys, values] if writes else [queries]
        given = [each for array in own for each in (array, self.strides(array))]
        given += self.of_pages(pages, tables, params)
        slots = batch * heads * shape.splits
        partials = [cupy.empty((slots, each), np.float32) for each in (DIM, 2)]
        output, done = cupy.empty((batch, heads, 1, DIM), np.float16), cupy.zeros(8, np.int32)
        outputs = [output] if is_whole else partials
        size = (KV_HEADS * shape.groups, shape.splits, batch)
        threads = (32 * shape.parts * shape.blocks, 1, 1)

        def run() -> None:
            read(size, threads, (*given, *outputs, done))
            if not is_whole:
                merge((heads, batch, 1), (32, 1, 1), (*partials, params, output))

        return queries, output, run

    def prefill(self, pages: Pages, tables: Any, steps: int) -> tuple[Any, Any, Callable[[], None]]:
        cupy, batch, heads = self.cupy, tables.shape[0], KV_HEADS * RATIO
        scale = DIM**-0.5 * math.log2(math.e)
        params = self.params(table_stride=tables.shape[1], steps=steps, scale=scale)
        queries = cupy.random.standard_normal((batch, heads, steps, DIM), dtype=np.float32)
        queries = queries.astype(np.float16)
        output, done = cupy.empty(queries.shape, np.float16), cupy.zeros(8, np.int32)
        kernel = self.kernel(
            "prefill",
            [*FLAGS[pages.page_format], "WHOLE"],
            K_DIM=DIM,
            V_DIM=DIM,
            THREADS=self.tuning.PREFILL_THREADS,
            SHARERS=1,
        )
        step = [queries, self.strides(queries)]
        given = [*step, *self.of_pages(pages, tables, params), output, done]
        tuning = self.tuning
        block = tuning.PREFILL_THREADS // tuning.LANES * tuning.SIMDGROUP_ROWS["cuda"]
        rows = -(-steps * RATIO // block)

        def run() -> None:
            kernel((rows, KV_HEADS, batch), (self.tuning.PREFILL_THREADS, 1, 1), tuple(given))

        return queries, output, run

    def numbers(self, pages: Pages, tables: Any, row: int) -> tuple[Any, Any]:
        """Keys and values [KV_HEADS, tokens, DIM] of a row, as float32."""
        cupy, length = self.cupy, int(tables[row, 0])
        held = pages.memory[tables[row, ROW_FIELDS:]]
        at = pages.offsets
        sides = []
        for first, after, centres, (fifths, scales) in (
            (0, at[1], at[4], SCALES[0]),
            (at[2], at[3], 0, SCALES[1]),
        ):
            words = KV_HEADS * PAGE * DIM * BITS[pages.page_format] // 16
            plane = held[:, first : first + words].reshape(
                -1, KV_HEADS, PAGE, words // KV_HEADS // PAGE
            )
            if pages.is_quantised:
                count = KV_HEADS * PAGE * (fifths + scales)
                steps = held[:, after : after + count].reshape(-1, KV_HEADS, PAGE, fifths + scales)
                centre = held[:, centres : centres + KV_HEADS * DIM] if centres else None
                numbers = self._decoded(
                    cupy.ascontiguousarray(plane), cupy.ascontiguousarray(steps), centre
                )
            else:
                numbers = cupy.ascontiguousarray(plane).view(np.float16).astype(np.float32)
            sides.append(numbers.transpose(1, 0, 2, 3).reshape(KV_HEADS, -1, DIM)[:, :length])
        return sides[0], sides[1]

    def _decoded(self, words: Any, scales: Any, centre: Any) -> Any:
        """Of q4, turned back; with a centre there are fifth bits before the scales."""
        cupy = self.cupy
        lower = words.view(np.uint8).reshape(*words.shape[:3], DIM // 32, 16)
        codes = cupy.concatenate([lower & 15, lower >> 4], -1).astype(np.float32) - 8
        if centre is not None:
            fifths = cupy.ascontiguousarray(scales[..., : DIM // 16]).view(np.uint32)
            places = cupy.asarray([8 * (j % 4) + j // 4 for j in range(32)], np.uint32)
            codes += (fifths[..., None] >> places & 1).astype(np.float32) * 16 - 8
            scales = cupy.ascontiguousarray(scales[..., DIM // 16 :])
        steps = scales.view(np.float16).astype(np.float32)
        numbers = codes.reshape(*steps.shape, -1) * steps[..., None]
        numbers = numbers.reshape(*words.shape[:3], DIM)
        if centre is not None:
            row = cupy.ascontiguousarray(centre).view(np.float16).astype(np.float32)
            numbers = numbers + row.reshape(-1, KV_HEADS, 1, DIM)
        at = np.arange(DIM)
        signs = np.array([[(-1) ** (int(i & j).bit_count()) for i in at] for j in at], np.float32)
        return numbers @ cupy.asarray(signs / math.sqrt(DIM))

    def error(self, pages: Pages, tables: Any, queries: Any, output: Any, row: int) -> float:
        """The largest difference of a row's output from dense attention in float32."""
        cupy = self.cupy
        keys, values = (each.repeat(RATIO, 0) for each in self.numbers(pages, tables, row))
        asked = queries[row].astype(np.float32) * DIM**-0.5
        logits, count, length = asked @ keys.transpose(0, 2, 1), asked.shape[1], keys.shape[1]
        later = cupy.arange(length)[None] > cupy.arange(length - count, length)[:, None]
        logits = cupy.where(later[None], -cupy.inf, logits)
        weights = cupy.exp(logits - logits.max(-1, keepdims=True))
        expected = weights / weights.sum(-1, keepdims=True) @ values
        return float(cupy.abs(expected - output[row].astype(np.float32)).max())

    def captured(self, run: Callable[[], None]) -> Callable[[], None]:
        """Launches a graph of CAPTURED runs."""
        run()
        stream = self.cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            for _ in range(CAPTURED):
                run()
            graph = stream.end_capture()
        return lambda: graph.launch(self.cupy.cuda.Stream.null)

    def seconds(self, run: Callable[[], None]) -> float:
        start, end = self.cupy.cuda.Event(), self.cupy.cuda.Event()
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(self.cupy.cuda.get_elapsed_time(start, end)) / 1000 / CAPTURED

    def in_turns(self, *runs: Callable[[], None]) -> list[float]:
        """The median seconds of a run of each, one after the other in every round. Each call of
        `runs` runs CAPTURED times."""
        for run in runs * 3:
            run()
        times = [[self.seconds(run) for run in runs] for _ in range(ROUNDS)]
        return [statistics.median(each) for each in zip(*times, strict=True)]


def decode_results(bench: Bench, quick: bool) -> list[dict[str, Any]]:
    cupy, results = bench.cupy, []
    source = cupy.zeros(1 << 29, cupy.uint16)
    target = cupy.empty_like(source)

    def copy() -> None:
        cupy.copyto(target, source)

    for batch in BATCHES[:2] if quick else BATCHES:
        for length in LENGTHS[:2] if quick else LENGTHS:
            for page_format in BITS:
                words = Pages(None, page_format).offsets[0]
                pages_bytes = batch * -(-length // PAGE) * words * 2
                if pages_bytes > MOST_BYTES:
                    continue
                tables = bench.tables(batch, length)
                pages = bench.filled(page_format, batch, length, tables)
                for writes in (False, True) if page_format == "fp16" else (False,):
                    queries, output, run = bench.decode(pages, tables, length, writes=writes)
                    decode, copied = bench.in_turns(bench.captured(run), bench.captured(copy))
                    error = bench.error(pages, tables, queries, output, batch - 1)
                    share = pages_bytes / decode / (2 * source.nbytes / copied)
                    results.append(
                        {
                            "operation": "write and decode" if writes else "decode",
                            "format": page_format,
                            "batch": batch,
                            "tokens": length,
                            "microseconds": 1e6 * decode,
                            "share_of_copy_bandwidth": share,
                            "largest_error": error,
                        }
                    )
                    say(results[-1])
                del pages, run, queries, output
                cupy.get_default_memory_pool().free_all_blocks()
    return results


def prefill_results(bench: Bench, quick: bool) -> list[dict[str, Any]]:
    results = []
    for page_format in BITS:
        for steps in (512,) if quick else (512, 2048, 8192):
            tables = bench.tables(1, steps)
            pages = bench.filled(page_format, 1, steps, tables)
            queries, output, run = bench.prefill(pages, tables, steps)
            keys, values = bench.numbers(pages, tables, 0)
            others = [] if (dense := torch_attention(queries, keys, values)) is None else [dense]
            seconds = bench.in_turns(bench.captured(run), *others)
            result: dict[str, Any] = {
                "operation": "prefill",
                "format": page_format,
                "tokens": steps,
                "microseconds": 1e6 * seconds[0],
                "largest_error": bench.error(pages, tables, queries, output, 0),
            }
            if others:
                result["times_torch"] = seconds[0] / seconds[1]
            results.append(result)
            say(result)
    return results


def torch_attention(queries: Any, keys: Any, values: Any) -> Callable[[], None] | None:
    """The same by PyTorch, where there is one."""
    try:
        import torch
    except ImportError:
        return None
    q = torch.as_tensor(queries, device="cuda")
    k, v = (torch.as_tensor(each, device="cuda").half()[None] for each in (keys, values))
    attention = torch.nn.functional.scaled_dot_product_attention

    def run() -> None:
        for _ in range(CAPTURED):
            attention(q, k, v, is_causal=True, enable_gqa=True)

    return run


def say(result: dict[str, Any]) -> None:
    print("  ".join(f"{name} {_short(value)}" for name, value in result.items()), flush=True)


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="small shapes only")
    parser.add_argument("--output", type=Path, help="where the results go, as JSON")
    arguments = parser.parse_args()
    try:
        import cupy
    except ImportError:
        print("cuda_kernels: no cupy: pip install cupy-cuda12x", file=sys.stderr)
        return 1
    bench = Bench(cupy)
    results = decode_results(bench, arguments.quick) + prefill_results(bench, arguments.quick)
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    if arguments.output:
        arguments.output.write_text(json.dumps({"device": name, "results": results}, indent=1))
    wrong = [result for result in results if not result["largest_error"] <= TOLERANCE]
    for result in wrong:
        print(f"WRONG: {result}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
