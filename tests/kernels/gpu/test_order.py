"""MLX runs kernels that write pages and kernels that read them in order, although it knows only
their inputs and outputs."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import pytest

from paged_kv.kernels.gpu import backend as gpu_backend
from paged_kv.kernels.gpu.order import Order
from paged_kv.kernels.pages.attention import Attention
from paged_kv.kernels.pages.attention_metadata import AttentionMetadata
from paged_kv.kernels.plain.plain_backend import PlainBackend
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

pytestmark = [needs_compiler, pytest.mark.parametrize("dialect", DIALECTS)]


class Forgetful(Order):
    """Leaves some tokens out of the chain."""

    def keeps(self) -> bool:
        return True

    def run(self, pages: Any, launch: Any, inputs: list[mx.array]) -> list[mx.array]:
        before = self.latest(pages)
        outputs = super().run(pages, launch, inputs)
        if not self.keeps():
            pages.kept.latest = before
        return outputs


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
        backend.write_and_attend(pages, token, queries, metadata, attention)
    return unordered(device.launches)


def test_all_that_touches_the_same_pages_is_in_order(dialect: str) -> None:
    assert _use(dialect) == []


def test_a_read_that_does_not_take_the_writes_token_is_noticed(
    dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class WithoutWrites(Forgetful):
        """Only reads leave a token."""

        writes = False

        def keeps(self) -> bool:
            self.writes = not self.writes
            return not self.writes

    monkeypatch.setattr(gpu_backend, "Order", WithoutWrites)
    faults = _use(dialect)
    assert any("paged_kv_write" in fault and "paged_kv_decode" in fault for fault in faults)


def test_a_write_that_does_not_take_the_reads_tokens_is_noticed(
    dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class WithoutReads(Forgetful):
        """Leaves out each of the first two of three tokens in turn, those of a write and of a
        read."""

        count = 0

        def keeps(self) -> bool:
            # The order is: write, decode, decode, write, decode, decode, prefill, copy.
            self.count += 1
            return self.count in (1, 4, 8)

    monkeypatch.setattr(gpu_backend, "Order", WithoutReads)
    faults = _use(dialect)
    assert any(fault.startswith("paged_kv_decode") and "write" in fault for fault in faults)
    assert not any(fault.startswith("paged_kv_write") for fault in faults)


def test_a_step_that_does_not_take_the_token_of_the_one_before_is_noticed(
    dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class WithoutTheLast(Forgetful):
        """The first of the two launches that write a step and attend leaves no token; nine others
        are between."""

        count = 0

        def keeps(self) -> bool:
            self.count += 1
            return self.count != 10

    monkeypatch.setattr(gpu_backend, "Order", WithoutTheLast)
    faults = _use(dialect)
    assert faults
    assert all(fault.count("paged_kv_decode") == 2 for fault in faults)


def test_a_second_thread_comes_when_the_first_has_computed(dialect: str) -> None:
    order, pages = Order(), new_pages(PlainBackend(), same(64), ["fp16"])
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
