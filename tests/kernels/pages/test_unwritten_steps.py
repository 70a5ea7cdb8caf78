"""Pages defer the write of a step until attention or any other read needs it."""

from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any

import mlx.core as mx
import pytest

from paged_kv.kernels.cpu import native_backend
from paged_kv.kernels.cpu.native_backend import NativeBackend
from paged_kv.kernels.cpu.native_library import MetadataStruct, NativeLibrary
from paged_kv.kernels.pages.attention_metadata import Attention, AttentionMetadata
from paged_kv.kernels.pages.backend import Backend
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.number_format import WORD
from paged_kv.kernels.pages.page_format import FP16, LayerGeometry
from tests.support.arrays import normal
from tests.support.attention_metadata import unpadded
from tests.support.backends import native_library

GEOMETRY = LayerGeometry(2, 32, mx.float32, 2, 32, mx.float32)
TABLE = (3, 65, 1)


def new_pages(backend: Backend) -> LayerPages:
    """Two slabs, of which the table holds 300 tokens. The rest is NaN, not the contents of an
    earlier test."""
    pages = LayerPages(GEOMETRY, backend, 64)
    for slab in (0, 1):
        pages.map_slab(slab, 6, FP16)
    pages.load(dict.fromkeys(TABLE, mx.full(pages.page(1).shape, 0xFFFF, dtype=WORD)))
    keys = normal((1, 2, 300, 32), mx.float32, 1)
    pages.write(keys, keys + 1, unpadded((TABLE,), (300,)))
    return pages


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[AttentionMetadata]:
    """The metadata of all steps, in the order in which the library writes them."""
    write, struct, noted = NativeLibrary.write, native_backend._metadata_struct, []
    metadata_of: dict[int, AttentionMetadata] = {}

    def note_metadata(metadata: AttentionMetadata) -> MetadataStruct:
        made = struct(metadata)
        metadata_of[id(made)] = metadata
        return made

    def note(self: NativeLibrary, pages: Any, struct: MetadataStruct, *step: mx.array) -> None:
        noted.append(metadata_of[id(struct)])
        write(self, pages, struct, *step)

    monkeypatch.setattr(native_backend, "_metadata_struct", note_metadata)
    monkeypatch.setattr(NativeLibrary, "write", note)
    return noted


def one_token(pages: LayerPages, seed: int, position: int = 300) -> AttentionMetadata:
    keys, metadata = normal((1, 2, 1, 32), mx.float32, seed), unpadded((TABLE,), (position + 1,))
    pages.write_later(keys, keys - 1, metadata)
    return metadata


def in_another_thread(function: Callable[..., Any], *arguments: Any) -> None:
    thread = Thread(target=function, args=arguments)
    thread.start()
    thread.join()


def attended(pages: LayerPages, metadata: AttentionMetadata) -> mx.array:
    queries = normal((len(metadata.context_lens), 4, 1, 32), mx.float32, 9)
    return pages.attend(queries, metadata, Attention(0.2))


def test_a_step_of_one_token_is_written_when_something_else_is_asked_for(
    written: list[AttentionMetadata],
) -> None:
    pages = new_pages(NativeBackend(native_library()))
    first = one_token(pages, 2)
    pages.gather(first)
    assert first not in written
    second = one_token(pages, 3, 301)
    assert written[-1] is first
    attended(pages, second)
    assert written[-1] is second
    pages.page(0)
    assert len(written) == 3


def assert_alike(use: Callable[[LayerPages], Sequence[mx.array]]) -> None:
    """A use has the same results as with the plain backend, which writes at once."""
    ours, expected = (
        use(new_pages(backend)) for backend in (NativeBackend(native_library()), Backend())
    )
    for one, other in zip(ours, expected, strict=True):
        assert mx.allclose(one, other, atol=1e-5)


def test_a_step_with_padding_is_owed_too(written: list[AttentionMetadata]) -> None:
    """Every sequence of a batch finds its own tokens, and no padding."""

    def use(pages: LayerPages) -> list[mx.array]:
        before, keys = len(written), normal((2, 2, 3, 32), mx.float32, 2)
        metadata = AttentionMetadata((TABLE, (0,)), (303, 2), (0, 1))
        pages.write_later(keys, keys - 1, metadata)
        assert len(written) == before
        queries = normal((2, 4, 3, 32), mx.float32, 9)
        return [pages.attend(queries, metadata, Attention(0.2)), *pages.gather(metadata)]

    assert_alike(use)


def whole_page(pages: LayerPages) -> mx.array:
    layout = pages.layout_of(65)
    return mx.ones((layout.page_units, layout.unit_words), dtype=mx.uint16)


OPERATIONS: dict[str, Callable[[LayerPages, AttentionMetadata], Any]] = {
    "attend to the same tokens": lambda pages, metadata: [attended(pages, metadata)],
    "gather": lambda pages, metadata: pages.gather(metadata),
    "attend to other tokens": lambda pages, metadata: [attended(pages, unpadded((TABLE,), (301,)))],
    "gather other tokens": lambda pages, metadata: pages.gather(unpadded((TABLE,), (301,))),
    "gather the tokens before": lambda pages, metadata: pages.gather(unpadded((TABLE,), (300,))),
    "gather of another table": lambda pages, metadata: pages.gather(unpadded((TABLE[:1],), (256,))),
    "write again": lambda pages, metadata: one_token(pages, 5),
    "copy": lambda pages, metadata: pages.copy({65: 2}),
    "load": lambda pages, metadata: pages.load({65: whole_page(pages)}),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_whatever_follows_finds_it_written(operation: str) -> None:
    def use(pages: LayerPages) -> list[mx.array]:
        given = OPERATIONS[operation](pages, one_token(pages, 2))
        found = [*pages.gather(unpadded((TABLE,), (301,)))]
        if operation == "copy":
            found += pages.gather(unpadded(((2,),), (45,)))
        return [*found, *given] if operation.startswith(("attend", "gather")) else found

    assert_alike(use)


@pytest.mark.parametrize("lengths", [(1, 1), (300, 300), (300, 7), (1, 257)])
def test_arrays_of_a_batch_have_it_before_and_after_it_is_written(lengths: tuple[int, ...]) -> None:
    metadata = unpadded((TABLE, (0, 64)), lengths)
    before = unpadded(metadata.block_tables, tuple(length - 1 for length in lengths))

    def use(pages: LayerPages) -> list[mx.array]:
        if longest := max(before.context_lens):
            keys = normal((2, 2, longest, 32), mx.float32, 3)
            pages.write(keys, keys + 2, before)
        keys = normal((2, 2, 1, 32), mx.float32, 4)
        pages.write_later(keys, keys + 2, metadata)
        gathered = pages.gather(metadata)
        attended(pages, metadata)
        return [*gathered, *pages.gather(metadata)]

    assert_alike(use)


def test_another_thread_finds_it_written(written: list[AttentionMetadata]) -> None:
    """Also if it comes while the first one's step is still being computed."""
    pages, expected = new_pages(NativeBackend(native_library())), new_pages(Backend())
    metadata = one_token(expected, 2)

    def write_what_takes_long() -> None:
        keys, slow = normal((1, 2, 1, 32), mx.float32, 2), normal((700, 700), mx.float32, 3)
        for _ in range(5):
            slow = slow @ slow / 700
        keys = keys + 0 * slow.sum()
        pages.write_later(keys, keys - 1, unpadded((TABLE,), (301,)))

    in_another_thread(write_what_takes_long)
    assert len(written) == 1
    for ours, theirs in zip(pages.gather(metadata), expected.gather(metadata), strict=True):
        assert mx.array_equal(ours, theirs)


@pytest.mark.parametrize("is_attended", [False, True])
def test_a_step_that_cannot_be_computed_stays_owed(
    is_attended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt during the wait loses nothing."""
    pages = new_pages(NativeBackend(native_library()))
    metadata = one_token(pages, 2)
    with monkeypatch.context() as patch:

        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(NativeLibrary, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            _ = attended(pages, metadata) if is_attended else pages.page(0)
    expected = new_pages(Backend())
    one_token(expected, 2)
    for ours, theirs in zip(pages.gather(metadata), expected.gather(metadata), strict=True):
        assert mx.array_equal(ours, theirs)
    assert mx.allclose(attended(pages, metadata), attended(expected, metadata), atol=1e-5)


def test_once_two_threads_have_come_steps_are_written_at_once(
    written: list[AttentionMetadata],
) -> None:
    """One thread cannot compute what another one has deferred."""
    pages = new_pages(NativeBackend(native_library()))
    in_another_thread(one_token, pages, 2)
    assert len(written) == 1
    metadata = one_token(pages, 3, 301)
    assert len(written) == 3
    assert written[-1] is metadata


def test_a_recorded_step_of_another_thread_counts_as_one_that_it_wrote() -> None:
    """Otherwise a thread defers a step that the other one cannot compute."""
    pages = new_pages(NativeBackend(native_library()))
    metadata = one_token(pages, 2)
    assert pages.unwritten
    mx.eval(pages.page(1))
    in_another_thread(pages.begin_write, metadata, 1)
    one_token(pages, 3, 301)
    assert not pages.unwritten


def test_what_a_slab_is_owed_is_written_before_it_goes(written: list[AttentionMetadata]) -> None:
    pages = new_pages(NativeBackend(native_library()))
    metadata = one_token(pages, 2)
    pages.unmap_slab(0)
    assert metadata not in written
    pages.unmap_slab(1)
    assert written[-1] is metadata


def test_a_slab_can_go_while_another_threads_step_is_not_computed() -> None:
    """Like a GPU, this backend does not begin steps. No sequence holds the block any more, so
    nobody needs the step."""

    class Lazy(NativeBackend):
        def begin(self, *arrays: mx.array) -> None:
            pass

    pages = new_pages(Lazy(native_library()))
    in_another_thread(one_token, pages, 2)
    pages.unmap_slab(1)
    assert 1 not in pages.slabs
