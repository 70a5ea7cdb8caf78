"""MLX runs kernels that write pages and kernels that read them in order, although it knows only
their inputs and outputs."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import pytest

from paged_kv.kernels.gpu import backend as gpu_backend
from paged_kv.kernels.gpu.kernels import Order
from paged_kv.kernels.pages.attention_metadata import Attention, AttentionMetadata
from paged_kv.kernels.pages.backend import Backend
from tests.support.arrays import normal
from tests.support.gpu_on_cpu.launch_order import unordered
from tests.support.gpu_pages import (
    DIALECTS,
    backend_on,
    device_of,
    needs_compiler,
    new_pages,
    same,
)


def _use(dialect: str) -> list[str]:
    """Two sequences in two slabs. One ends, and a step and a copy write its page again."""
    device = device_of(dialect)
    backend = backend_on(device, dialect)
    pages = new_pages(backend, same(64), ["fp16", "fp16"])
    step = normal((2, 2, 20, 64), mx.float16, 1)
    queries = normal((2, 4, 1, 64), mx.float16, 2)
    attention = Attention(0.125)
    metadata = AttentionMetadata(((0,), (8,)), (20, 20), (0, 0))
    for _ in range(2):
        pages.write(step, step, metadata)
        pages.attend(queries, metadata, attention)
        pages.attend(queries, metadata, attention)
    pages.attend(normal((2, 4, 3, 64), mx.float16, 2), metadata, attention)
    pages.copy({0: 8})
    pages.gather(metadata)
    for _ in range(2):
        token = (step[:, :, :1], step[:, :, :1])
        backend.attend(pages, queries, metadata, attention, step=token)
    return unordered(device.launches)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("dialect", DIALECTS)
def test_all_that_touches_the_same_pages_is_in_order(dialect: str) -> None:
    assert _use(dialect) == []


# The tokens of `_use` are those of: write, decode, decode, write, decode, decode, prefill, copy,
# gather, decode, decode.
@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("forgotten", "earlier", "later"),
    [
        ({1, 4, 8, 10}, "write", "decode"),
        ({2, 3, 5, 6, 7}, "decode", "write"),
        ({10}, "decode", "decode"),
    ],
)
def test_a_launch_that_does_not_take_anothers_token_is_noticed(
    forgotten: set[int], earlier: str, later: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forgetful(Order):
        """Leaves some tokens out of the chain."""

        count = 0

        def run(self, pages: Any, launch: Any, inputs: list[mx.array]) -> list[mx.array]:
            before = self.latest(pages)
            outputs = super().run(pages, launch, inputs)
            self.count += 1
            if self.count in forgotten:
                pages.kept.latest = before
            return outputs

    monkeypatch.setattr(gpu_backend, "Order", Forgetful)
    faults = [fault.split(" and ") for fault in _use("metal")]
    assert any(f"paged_kv_{earlier}" in one and f"paged_kv_{later}" in two for one, two in faults)


def test_a_second_thread_comes_when_the_first_has_computed() -> None:
    order, pages = Order(), new_pages(Backend(), same(64), ["fp16"])
    token = mx.arange(8) + 1

    def first(inputs: Any) -> list[mx.array]:
        return [token]

    def second(inputs: Any) -> list[mx.array]:
        return [mx.arange(8) + 2]

    launches: list[Any] = [first, second]
    order.run(pages, launches[0], [])
    with ThreadPoolExecutor(1) as executor:
        with pytest.raises(RuntimeError):
            executor.submit(order.latest, pages).result()
        mx.eval(token)
        assert executor.submit(order.latest, pages).result() is token
        executor.submit(order.run, pages, launches[1], []).result()
    assert order.latest(pages).tolist() == list(range(2, 10))
