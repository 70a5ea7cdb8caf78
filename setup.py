"""Compiles the CPU kernels where there is a C++ compiler; everything else is in pyproject.toml.

One source is compiled once for each instruction set, with its flags, and all objects are linked
into one library with a C interface, which knows no Python. On Linux a second, small library lets
MLX find OpenBLAS. Without a compiler the package installs all the same: pip -v shows why, and
paged_kv says at run time that it runs without.
"""

import os
import platform
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

if sys.platform == "darwin":
    # Python's own flags may ask for two architectures at once; these kernels are for one.
    os.environ.setdefault("ARCHFLAGS", f"-arch {platform.machine()}")

KERNELS = Path("kernels/cpu")
COMMON = ["attention", "instruction_sets", "page_moves", "thread_pool"]
FLAGS = ["-std=c++17", "-O3", "-fno-math-errno", "-fvisibility=hidden", "-pthread", "-g0"]
# Codes are rounded as MLX rounds them: what is to be one operation is written as one.
FLAGS += ["-ffp-contract=off"]
# Flags for a test build, such as -fsanitize=address.
EXTRA_FLAGS = os.environ.get("PAGED_KV_CXXFLAGS", "").split()

AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
# GCC 12 warns of its own headers: __m512i __Y = __Y. Clang does not know the second of these.
AVX512 += ["-Wno-uninitialized", "-Wno-maybe-uninitialized", "-Wno-unknown-warning-option"]
INSTRUCTION_SETS: dict[str, dict[str, list[str]]] = {
    "x86_64": {
        "avx512": AVX512,
        "avx512_bf16": [*AVX512, "-mavx512bf16"],
        "avx2": AVX2,
        "generic": [],
    },
    "aarch64": {"neon": [], "generic": []},
}


def architecture() -> str:
    """What is compiled for: not always this machine on macOS."""
    flags = os.environ.get("ARCHFLAGS", "")
    machine = flags.split()[-1] if flags else platform.machine()
    return {"arm64": "aarch64", "AMD64": "x86_64"}.get(machine, machine)


SOURCES: dict[str, list[str]] = {name: [] for name in COMMON}
for set_name, set_flags in INSTRUCTION_SETS.get(architecture(), {"generic": []}).items():
    SOURCES[f"kernels_{set_name}"] = set_flags


class BuildLibraries(build_ext):
    """Builds libraries that are no Python modules, from objects with flags of their own."""

    def get_ext_filename(self, fullname: str) -> str:
        suffix = "dylib" if sys.platform == "darwin" else "so"
        return f"{fullname.replace('.', os.sep)}.{suffix}"

    def build_extension(self, ext: Extension) -> None:
        if ext is openblas_names:
            self._build_openblas_names(ext)
            return
        objects = [
            built
            for name in SOURCES
            for built in self.compiler.compile(
                [str(KERNELS / f"{name}.cpp")],
                output_dir=self.build_temp,
                extra_postargs=[*FLAGS, *SOURCES[name], *EXTRA_FLAGS],
                depends=ext.depends,
            )
        ]
        self.compiler.link_shared_object(
            objects,
            self.get_ext_fullpath(ext.name),
            extra_postargs=["-pthread", *EXTRA_FLAGS],
            target_lang="c++",
        )

    def _build_openblas_names(self, ext: Extension) -> None:
        """Without EXTRA_FLAGS: code of a sanitizer cannot run while the dynamic linker binds."""
        objects = self.compiler.compile(
            ext.sources,
            output_dir=self.build_temp,
            extra_postargs=["-std=gnu11", "-O2", "-fvisibility=hidden", "-g0"],
        )
        self.compiler.link_shared_object(
            objects, self.get_ext_fullpath(ext.name), extra_postargs=["-ldl"]
        )


class PlatformWheel(bdist_wheel):
    """A wheel for any Python on one platform."""

    def get_tag(self) -> tuple[str, str, str]:
        tag: tuple[str, str, str] = super().get_tag()
        return "py3", "none", tag[2]


library = Extension(
    "paged_kv.kernels.libpaged_kv_cpu",
    sources=[str(KERNELS / f"{name}.cpp") for name in SOURCES],
    depends=sorted(str(path) for path in KERNELS.glob("*") if path.suffix in {".h", ".inc"}),
    optional=True,
)

openblas_names = Extension(
    "paged_kv.libpaged_kv_blas", sources=[str(KERNELS / "openblas_names.c")], optional=True
)

setup(
    # On a Mac MLX has Apple's BLAS.
    ext_modules=[library, openblas_names] if sys.platform == "linux" else [library],
    cmdclass={"build_ext": BuildLibraries, "bdist_wheel": PlatformWheel},
)
