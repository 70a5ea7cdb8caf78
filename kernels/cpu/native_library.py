"""Loads the compiled CPU kernels and calls them.

kernels/cpu/paged_kv_cpu.h is the interface; the structures here mirror that file. Arrays are
passed as DLPack tensors, without a copy.
"""

import ctypes
import os
import sys
from functools import cache
from math import ceil
from pathlib import Path
from typing import NoReturn

import mlx.core as mx

from paged_kv.kernels.pages.errors import QuantisedPage
from paged_kv.kernels.pages.memory import read_if_there

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def thread_count() -> int:
    """The number that PAGED_KV_THREADS gives, or else the cores that this process may use.

    Raises:
        ValueError: PAGED_KV_THREADS is not a number from 1 on.
    """
    threads = os.environ.get("PAGED_KV_THREADS")
    if threads is None:
        return available_cores()
    if not threads.isascii() or not threads.isdigit() or int(threads) < 1:
        raise ValueError(f"PAGED_KV_THREADS must be a number of threads from 1 on, got {threads!r}")
    return int(threads)


def available_cores() -> int:
    """The cores that this process's affinity and its control groups' quotas allow; at least 1."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, min([cores, *_quotas(_own_groups())]))


def _own_groups() -> list[Path]:
    """The folders of this process's control groups and of their parents."""
    names = {"/"}
    for line in read_if_there(OWN_CGROUPS).splitlines():
        names.add(line.rpartition(":")[2])
    folders = []
    for root in (CGROUPS, CGROUPS / "cpu"):
        for name in names:
            path = root / name.lstrip("/")
            folders += [path, *(parent for parent in path.parents if root in parent.parents)]
    return folders


def _quotas(folders: list[Path]) -> list[int]:
    """The cores, rounded up, that quotas of control groups (version 2 or 1) allow."""
    quotas = []
    for folder in folders:
        limit, _, period = read_if_there(folder / "cpu.max").partition(" ")
        if not limit:
            limit = read_if_there(folder / "cpu.cfs_quota_us")
            period = read_if_there(folder / "cpu.cfs_period_us")
        if limit.isdigit() and period.isdigit() and int(period):
            quotas.append(ceil(int(limit) / int(period)))
    return quotas


SUFFIX = "dylib" if sys.platform == "darwin" else "so"
LIBRARY = Path(__file__).parents[1] / f"libpaged_kv_cpu.{SUFFIX}"

_int_pointer = ctypes.POINTER(ctypes.c_int32)


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class LayoutStruct(ctypes.Structure):
    """PagedKvLayout."""

    _fields_ = (
        *_fields(ctypes.c_int64, "page_bytes key_scales key_centres values value_scales summaries"),
        *_fields(ctypes.c_int32, "k_format v_format"),
    )


class PagesStruct(ctypes.Structure):
    """PagedKvPages."""

    _fields_ = (
        ("slabs", ctypes.POINTER(ctypes.c_void_p)),
        ("slab_layouts", _int_pointer),
        ("layouts", ctypes.POINTER(LayoutStruct)),
        *_fields(ctypes.c_int32, "slab_stride kv_heads k_dim v_dim k_dtype v_dtype"),
    )


class MetadataStruct(ctypes.Structure):
    """PagedKvMetadata."""

    _fields_ = (
        *_fields(ctypes.c_void_p, "block_tables context_lens right_padding"),
        *_fields(ctypes.c_int32, "batch table_stride"),
        *_fields(ctypes.c_void_p, "row_order shared_pages"),
    )


class OptionsStruct(ctypes.Structure):
    """PagedKvOptions."""

    _fields_ = (
        ("scale", ctypes.c_float),
        *_fields(ctypes.c_int32, "causal window"),
        ("softcap", ctypes.c_float),
        ("read_tokens", ctypes.c_int32),
        *_fields(ctypes.c_void_p, "sinks new_k new_v"),
    )


_NAME = b"dltensor"
_address = ctypes.pythonapi.PyCapsule_GetPointer
_address.restype = ctypes.c_void_p
_address.argtypes = (ctypes.py_object, ctypes.c_char_p)


class Tensor:
    """A DLPack tensor of a computed array; `address` is valid as long as this object lives."""

    __slots__ = ("_capsule", "address")

    def __init__(self, array: mx.array) -> None:
        self._capsule = array.__dlpack__()
        self.address: int = _address(self._capsule, _NAME)


class NativeLibrary:
    """The functions of the library; see the header for what they do.

    Attributes:
        instruction_set: the one in use.
        path: of the file.
        ask_for_huge_pages: asks the system to back memory (address, bytes) with huge pages as they
            are written, if it can.
        page_bytes_read: the bytes of pages that attention has read so far, what rows read together
            counted once.

    Raises:
        OSError: the file is missing, or is no library for this machine.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Not PyDLL: CDLL releases the interpreter's lock during a call.
        self._library = ctypes.CDLL(str(path))
        self._library.paged_kv_instruction_sets.restype = ctypes.c_char_p
        pages, metadata = ctypes.POINTER(PagesStruct), ctypes.POINTER(MetadataStruct)
        tensor, options = ctypes.c_void_p, ctypes.POINTER(OptionsStruct)
        self._write = self._function("write", pages, metadata, tensor, tensor)
        self._attend = self._function("attend", pages, metadata, tensor, tensor, tensor, options)
        self._copy = self._function("copy", pages, _int_pointer, _int_pointer, ctypes.c_int32)
        self._load = self._function("load", pages, ctypes.c_int32, tensor)
        self.ask_for_huge_pages = self._library.paged_kv_ask_for_huge_pages
        self.ask_for_huge_pages.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        self.ask_for_huge_pages.restype = None
        self.page_bytes_read = self._library.paged_kv_page_bytes_read
        self.page_bytes_read.restype = ctypes.c_int64
        self.instruction_set = self.instruction_sets[0]

    @property
    def instruction_sets(self) -> tuple[str, ...]:
        """The library's instruction sets that this machine supports; the first is the default."""
        names: bytes = self._library.paged_kv_instruction_sets()
        return tuple(names.decode().split(","))

    def use_instruction_set(self, name: str) -> None:
        """Use an instruction set from now on.

        Raises:
            ValueError: `name` is not one of `instruction_sets`.
        """
        if name not in self.instruction_sets:
            known = ", ".join(self.instruction_sets)
            raise ValueError(f"PAGED_KV_ISA must be one of {known} on this machine, got {name!r}")
        self._library.paged_kv_use_instruction_set(name.encode())
        self.instruction_set = name

    def use_threads(self, count: int) -> None:
        self._library.paged_kv_use_threads(count)

    # Arrays must be computed already. Their DLPack capsules must live until the call is over.

    def write(
        self, pages: PagesStruct, metadata: MetadataStruct, keys: mx.array, values: mx.array
    ) -> None:
        k, v = keys.__dlpack__(), values.__dlpack__()
        status = self._write(pages, metadata, _address(k, _NAME), _address(v, _NAME))
        if status:
            _fail(status)

    def attend(
        self,
        pages: PagesStruct,
        metadata: MetadataStruct,
        queries: mx.array,
        position_queries: mx.array | None,
        outputs: mx.array,
        options: OptionsStruct,
    ) -> None:
        q, o, p = queries.__dlpack__(), outputs.__dlpack__(), None
        positions = None
        if position_queries is not None:
            p = position_queries.__dlpack__()
            positions = _address(p, _NAME)
        status = self._attend(
            pages, metadata, _address(q, _NAME), positions, _address(o, _NAME), options
        )
        if status:
            _fail(status)

    def copy(self, pages: PagesStruct, sources: list[int], targets: list[int]) -> None:
        array = ctypes.c_int32 * len(sources)
        status = self._copy(pages, array(*sources), array(*targets), len(sources))
        if status:
            _fail(status)

    def load(self, pages: PagesStruct, entry: int, content: mx.array) -> None:
        tensor = content.__dlpack__()
        status = self._load(pages, entry, _address(tensor, _NAME))
        if status:
            _fail(status)

    def _function(self, name: str, *types: type) -> "ctypes._NamedFuncPointer":
        function = self._library[f"paged_kv_{name}"]
        function.argtypes = types
        function.restype = ctypes.c_int
        return function


def _fail(status: int) -> NoReturn:
    if status == 1:
        raise MemoryError("the CPU kernels found no memory for their intermediate results")
    if status == 3:
        raise QuantisedPage
    raise ValueError("the shapes or dtypes of the arrays do not fit the pages")


@cache
def load_native_library() -> tuple[NativeLibrary | None, str]:
    """The library, ready for use; or None and the reason.

    PAGED_KV_ISA names the instruction set to use, PAGED_KV_THREADS the number of threads.

    Raises:
        ValueError: one of the two variables is invalid.
    """
    if not LIBRARY.exists():
        return None, "it was not built: there was no C++ compiler when paged_kv was installed"
    try:
        library = NativeLibrary(LIBRARY)
    except (OSError, AttributeError) as error:
        return None, f"it does not load: {error}"
    library.use_threads(thread_count())
    if name := os.environ.get("PAGED_KV_ISA"):
        library.use_instruction_set(name)
    return library, ""
