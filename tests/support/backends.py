"""Lists the backends of tests: the plain one, and the native one on each instruction set."""

from paged_kv.kernels.backends import backend_for
from paged_kv.kernels.cpu.native_backend import NativeBackend
from paged_kv.kernels.cpu.native_library import NativeLibrary, load_native_library
from paged_kv.kernels.pages.backend import Backend
from paged_kv.kernels.pages.page_format import LayerGeometry


def native_library() -> NativeLibrary:
    """The native library. Fails if it was not built."""
    library, reason = load_native_library()
    assert library is not None, reason
    return library


def instruction_sets() -> tuple[str, ...]:
    """The instruction sets that this machine has; none if the library was not built."""
    library, _ = load_native_library()
    return () if library is None else library.instruction_sets


BACKENDS = ["plain", *(f"native-{name}" for name in instruction_sets())]


def backend_named(name: str, geometry: LayerGeometry) -> Backend:
    """The named backend, or the plain one if that backend cannot hold this geometry. The
    instruction set stays chosen until another is named.

    Its instruction set serves until another is named.
    """
    if name == "plain":
        return Backend()
    library = native_library()
    library.use_instruction_set(name.removeprefix("native-"))
    return backend_for(NativeBackend(library), geometry)
