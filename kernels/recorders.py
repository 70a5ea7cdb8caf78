"""Finds what records the operations of a backend."""

from paged_kv.kernels.gpu.backend import GpuBackend
from paged_kv.kernels.gpu.recorder import GpuRecorder
from paged_kv.kernels.pages.backend import Backend
from paged_kv.kernels.pages.step_recorder import StepRecorder
from paged_kv.kernels.plain.plain_backend import PlainBackend
from paged_kv.kernels.plain.plain_recorder import PlainRecorder


def recorder_of(backend: Backend) -> StepRecorder | None:
    """The recorder of a backend's steps; None if MLX cannot record them, because they are not
    operations of its graph, or because plain operations stand in for some kernels."""
    if isinstance(backend, GpuBackend):
        return GpuRecorder(backend, backend.order)
    return PlainRecorder() if isinstance(backend, PlainBackend) else None
