"""NVIDIA's own compiler, from wheels. It needs no GPU and no driver."""

import ctypes
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

OPTIONS = ["--device-as-default-execution-space", "--std=c++17", "--ptxas-options=-v"]
# Replaces a header of MLX that its Linux wheel without CUDA lacks. There, strides are an array of
# cuda::std, which alone takes the compiler longer than a kernel.
UTILS = b"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
namespace mlx::core::cu {
using int32_t = int;
using int64_t = long;
using uint16_t = unsigned short;
struct Strides {
  int64_t all[10];
  __device__ const int64_t& operator[](unsigned i) const { return all[i]; }
};
}
"""
# The other header that MLX includes; kernels use nothing of it.
HEADERS = {b"mlx/backend/cuda/device/utils.cuh": UTILS, b"cooperative_groups.h": b""}


def why_not() -> str:
    """Why NVRTC cannot compile here; empty if it can."""
    missing = "no NVRTC: pip install 'paged-kv[nvrtc]'"
    if find_spec("nvidia") is None:
        return missing
    return "" if find_spec("nvidia.cuda_nvrtc") and find_spec("nvidia.cuda_cccl") else missing


@cache
def _folder(package: str) -> Path:
    spec = find_spec(f"nvidia.{package}")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


@cache
def _library() -> ctypes.CDLL:
    (path,) = (_folder("cuda_nvrtc") / "lib").glob("libnvrtc.so.*")
    return ctypes.CDLL(str(path))


def compiled(text: str, architecture: str) -> tuple[bytes, str]:
    """The machine code of a text for an architecture such as "sm_90", an ELF file, empty if it does
    not compile; and NVRTC's messages."""
    library, program = _library(), ctypes.c_void_p()
    count = len(HEADERS)
    names, headers = (
        (ctypes.c_char_p * count)(*HEADERS),
        (ctypes.c_char_p * count)(*HEADERS.values()),
    )
    created = library.nvrtcCreateProgram(
        ctypes.byref(program), text.encode(), b"kernel.cu", count, headers, names
    )
    assert created == 0
    includes = [
        f"--include-path={_folder(each) / 'include'}" for each in ("cuda_runtime", "cuda_cccl")
    ]
    options = [*OPTIONS, f"--gpu-architecture={architecture}", *includes]
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = library.nvrtcCompileProgram(program, len(options), given)
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    size.value = 0
    if not failed:
        library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    if not failed:
        library.nvrtcGetCUBIN(program, code)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw, log.value.decode()


def local_bytes(log: str) -> int:
    """The bytes of a thread that lie in memory and in no register, by the messages of a kernel."""
    found = re.search(r"(\d+) bytes stack frame", log)
    assert found is not None
    return int(found[1])
