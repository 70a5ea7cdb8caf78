"""The text of a kernel that MLX gets at each call: MLX joins and hashes all of it."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import mlx.core as mx
import pytest

from paged_kv.kernels.gpu.kernels import GpuKernels
from paged_kv.kernels.gpu.text import kernel_text, shortened
from tests.support.gpu_pages import DIALECTS

MOST_OF_DECODE = 10_600
FORMATS = (["HAS_FLOATS"], ["HAS_Q8", "HAS_CODES"], ["HAS_Q4", "HAS_Q5", "HAS_CODES"])
ALL_FORMATS = ["HAS_FLOATS", "HAS_Q8", "HAS_Q4", "HAS_Q5", "HAS_CODES"]


def _text(dialect: str, operation: str, flags: list[str], dim: int = 128) -> str:
    constants = {"K_DIM": dim, "V_DIM": dim, "ROWS": 8, "BLOCKS": 1, "PARTS": 8, "SIMDGROUPS": 8}
    constants["AHEAD"] = 8
    kernels = GpuKernels(dialect, lambda **given: given)
    given: dict[str, Any] = kernels.kernel(operation, mx.bfloat16, constants, flags)
    return str(given["header"]) + str(given["source"])


def _decode_flags() -> Iterator[list[str]]:
    for formats, step in product((*FORMATS, ALL_FORMATS), ([], ["STEP"])):
        for kind in (["WHOLE"], ["WHOLE", "SINKS"], ["PARTIAL"]):
            yield [*formats, *step, *kind]
            yield [*formats, *step, *kind, "CHOSEN"]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.slow
def test_no_variant_of_decode_is_long(dialect: str) -> None:
    for flags in _decode_flags():
        assert len(_text(dialect, "decode", flags, dim=256)) < MOST_OF_DECODE, flags


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    "operation",
    ["write", "decode", "latent", "merge", "prefill", "copy", "gather", "summarise", "score"],
)
def test_a_text_has_nothing_that_no_compiler_needs(dialect: str, operation: str) -> None:
    lines = _text(dialect, operation, [*ALL_FORMATS, "WHOLE"]).splitlines()
    assert not any("//" in line or line.startswith(("#if", "#else", "#end")) for line in lines)
    assert not any(line.startswith(" ") for line in lines)


def test_metals_compiler_is_told_of_how_many_threads_a_core_runs() -> None:
    """Just before the signature, which MLX writes. In CUDA nothing can stand there."""
    constants = {"K_DIM": 512, "V_DIM": 64, "THREADS": 512, "SHARERS": 2}
    flags = ["HAS_FLOATS", "IN_GROUPS", "OF_LATENTS"]
    metal, cuda = (
        kernel_text(dialect, "latent", "float16", constants, flags).header for dialect in DIALECTS
    )
    assert metal.endswith("}\n[[max_total_threads_per_threadgroup(512)]]\n")
    assert cuda.endswith("}\n")


def test_what_a_variant_does_not_use_is_not_in_its_text() -> None:
    of_floats, of_codes = (
        len(_text("metal", "copy", formats)) for formats in (FORMATS[0], ALL_FORMATS)
    )
    assert of_floats < of_codes - 1000
    assert "simd_max" not in _text("metal", "copy", FORMATS[0])
    assert "simd_max" in _text("metal", "copy", FORMATS[1])


def test_short_names_are_of_our_words_only_and_the_same_everywhere() -> None:
    many = "float " * 5
    header = f'{many}\nint longer(float x) {{\nasm("longer"); return other + 1.0f - -longer;\n}}\n'
    body = "longer = value + a;\n"
    found = shortened(header, body, {"longer", "value"}, {"value"})
    lines = found[0].splitlines()
    assert lines[0] == "#define A float"
    assert lines[-3:] == ["int b(A x){", 'asm("longer"); return other + 1.0f - -b;', "}"]
    assert found[1] == "b=value+a;\n"
