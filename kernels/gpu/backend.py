"""Reads and writes pages with GPU kernels, which write in place.

Everything here is lazy. kernels/gpu/kernels.py makes reads wait for writes and writes for reads.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial, wraps
from operator import eq
from threading import get_ident
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from paged_kv.kernels.gpu import tuning
from paged_kv.kernels.gpu.arrays import BoundSlabs, PageKind, bind, bound_slabs, parameters
from paged_kv.kernels.gpu.attention import PagedAttention
from paged_kv.kernels.gpu.kernels import DONE, Chain, GpuKernels, Launch, Maker, Order, Output
from paged_kv.kernels.gpu.text import KERNELS
from paged_kv.kernels.pages.attention_metadata import Attention, AttentionMetadata, Unwritten
from paged_kv.kernels.pages.backend import Backend, StepRecorder, summarise
from paged_kv.kernels.pages.choice import LEAST_READ_TOKENS, RUNS_OF_PAGE, chooses, chosen_runs
from paged_kv.kernels.pages.dense_attention import Read, attend_by_sequence
from paged_kv.kernels.pages.errors import warn_once
from paged_kv.kernels.pages.layer_memory import MAX_SLABS, WRITABLE, LayerMemory
from paged_kv.kernels.pages.number_format import CENTRE_PARTS
from paged_kv.kernels.pages.page_format import PAGE_SIZE, RUN_TOKENS, LayerGeometry
from paged_kv.kernels.pages.self_test import Check, Probe
from paged_kv.kernels.pages.tables import TABLE_WIDTH, TABLES, Tables, tables_of
from paged_kv.kernels.pages.verdicts import WrongKernel, digest_of

assert tuning.SLOT_SIMDGROUPS == CENTRE_PARTS  # copies sum a part of a page in each simdgroup

HEAD_SIZES = {64, 80, 96, 128, 192, 256}
# Of keys and values that have the same size.
WIDE_SIZES = {(512, 512)}
# Of latents and their position keys, which only latent attention reads: no kernel takes their pages
# for keys and values.
LATENT_SIZES = {(512, 64)}
DTYPES = {mx.float16, mx.bfloat16}


Operation = TypeVar("Operation", bound=Callable[..., Any])


def _or_plain(operation: Operation) -> Operation:
    """Let plain operations stand in for a kernel that turns out to be wrong before it is used."""

    @wraps(operation)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        try:
            return operation(self, *args, **options)
        except WrongKernel:
            return operation(self, *args, **options)  # which uses no kernel any more

    return call  # type: ignore[return-value]  # has the operation's arguments


class GpuBackend(Backend):
    """See `Backend` for the operations. Plain ones stand in where there is no kernel.

    Args:
        dialect: "metal" or "cuda".
        maker: compiles a kernel of that dialect.

    Attributes:
        fallbacks: how often plain MLX operations stood in, because a batch had pages in more slabs
            than a kernel takes, or because a kernel is wrong.
    """

    writes_in_place = True

    def __init__(self, dialect: str, maker: Maker) -> None:
        self.name = dialect
        self.order = Order()
        self.fallbacks = 0
        self._kernels = GpuKernels(dialect, maker)
        self._attention = PagedAttention(self._kernels, self.order, self._certified)
        self._launch = lru_cache(maxsize=256)(self._launch_of)
        self._score = lru_cache(maxsize=256)(self._score_of)

    @property
    def recorder(self) -> StepRecorder:
        return GpuRecorder(self)

    @property
    def build(self) -> str:
        return digest_of(KERNELS / "gpu", KERNELS / self.name)

    def supports(self, geometry: LayerGeometry) -> bool:
        dims = geometry.k_dim, geometry.v_dim
        has_kernels = HEAD_SIZES.issuperset(dims) or dims in WIDE_SIZES
        if dims in LATENT_SIZES:
            has_kernels = geometry.k_heads == 1
        return (
            has_kernels
            and geometry.k_heads == geometry.v_heads
            and geometry.k_dtype == geometry.v_dtype
            and geometry.k_dtype in DTYPES
        )

    def synchronize(self, pages: LayerMemory) -> None:
        mx.eval(self.order.latest(pages))

    def forget_pending(self, pages: LayerMemory) -> None:
        self.order.restart(pages)

    @_or_plain
    def write(
        self, pages: LayerMemory, keys: mx.array, values: mx.array, metadata: AttentionMetadata
    ) -> None:
        tables, slabs = self._bound(pages, metadata)
        if not tables.slabs or not keys.shape[2]:
            return
        pages.require_writable(metadata, keys.shape[2])
        if slabs is None:
            self._fall_back(pages)
            super().write(pages, keys, values, metadata)
            return
        self._run("write", pages, slabs, tables.array, keys.shape[2], [keys, values])
        if pages.geometry.has_summaries:
            self.summarise(pages, metadata.filled_entries(keys.shape[2]))

    @_or_plain
    def summarise(self, pages: LayerMemory, entries: Sequence[int]) -> None:
        """Make the summaries of full pages of 16 bits, in at most 16 slabs."""
        if self.is_disabled:
            for entry in entries:
                summarise(pages, entry)
        elif entries:
            slabs, numbered = _numbered(entries, pages.slab_stride)
            table = _table([(entry,) for entry in numbered])
            self._run("summarise", pages, bound_slabs(pages, slabs), table, RUNS_OF_PAGE)

    @_or_plain
    def load(self, pages: LayerMemory, contents: Mapping[int, mx.array]) -> None:
        """Copies from an array that is laid out as a slab of these pages."""
        if self.is_disabled:
            self._fall_back(pages)
            super().load(pages, contents)
            return
        stride = pages.slab_stride
        for layout in {pages.layout_of(entry) for entry in contents}:
            entries = [entry for entry in contents if pages.layout_of(entry) == layout]
            memory = mx.concatenate([mx.contiguous(contents[entry]) for entry in entries])
            mx.eval(memory)
            for slab in {entry // stride for entry in entries}:
                mine = [each for each in enumerate(entries) if each[1] // stride == slab]
                pairs = [(at, stride + entry % stride) for at, entry in mine]
                target = pages.slabs[slab]
                bound = bind([(memory, layout), (target.memory, target.layout)], stride)
                self._run("copy", pages, bound, _table(pairs), PAGE_SIZE)

    @_or_plain
    def copy(self, pages: LayerMemory, copies: Mapping[int, int]) -> None:
        slabs, numbered = _numbered([*copies, *copies.values()], pages.slab_stride)
        if len(slabs) > MAX_SLABS or self.is_disabled:
            self._fall_back(pages)
            super().copy(pages, copies)
            return
        pairs = list(zip(numbered[: len(copies)], numbered[len(copies) :], strict=True))
        if pairs:
            self._run("copy", pages, bound_slabs(pages, slabs), _table(pairs), PAGE_SIZE)

    @_or_plain
    def gather(
        self, pages: LayerMemory, metadata: AttentionMetadata, unwritten: Unwritten | None
    ) -> tuple[mx.array, mx.array]:
        tables, slabs = self._bound(pages, metadata)
        if slabs is None:
            self._fall_back(pages)
            keys, values = super().gather(pages, metadata, unwritten)
            mx.eval(keys, values)
            return keys, values
        length = max(metadata.ends)
        if not length:
            return super().gather(pages, metadata, unwritten)
        new = self._in_dtype(pages, unwritten) or ()
        count = new[0].shape[2] if new else 0
        keys, values, _ = self._run("gather", pages, slabs, tables.array, length, new, count)
        return keys, values

    def gather_tokens(
        self, pages: LayerMemory, metadata: AttentionMetadata, indices: mx.array
    ) -> tuple[mx.array, mx.array]:
        """With plain operations, computed at once: no kernel does this."""
        self.fallbacks += 1
        self.synchronize(pages)
        keys, values = super().gather_tokens(pages, metadata, indices)
        mx.eval(keys, values)
        return keys, values

    @_or_plain
    def attend(
        self,
        pages: LayerMemory,
        queries: mx.array,
        metadata: AttentionMetadata,
        attention: Attention,
        unwritten: Unwritten | None = None,
        position_queries: mx.array | None = None,
        *,
        step: Unwritten | None = None,
    ) -> mx.array:
        """See `Backend.attend`. A step of one token per sequence that is written takes no more
        launches than without it. For latent steps of several tokens, MLX attends to what a kernel
        gathers: one head. A step that is all that its sequences have is not gathered."""
        tables, slabs = self._bound(pages, metadata)
        geometry, dtype, own = pages.geometry, queries.dtype, pages.geometry.k_dtype
        is_decode, at_hand = queries.shape[2] == 1 and unwritten is None, step or unwritten
        if step is not None:
            is_for_latents = (geometry.k_dim, geometry.v_dim) in LATENT_SIZES
            if not is_decode or is_for_latents or slabs is None or not tables.slabs:
                self.write(pages, *step, metadata)
                step = None
            elif WRITABLE not in metadata.memo:  # Not a call in each layer.
                pages.require_writable(metadata, 1)
        if slabs is None:
            self._fall_back(pages)
            output = super().attend(
                pages, queries, metadata, attention, unwritten, position_queries
            )
            mx.eval(output)
            return output
        is_gathered = not is_decode
        if position_queries is None and step is None:
            is_gathered = self._is_gathered(geometry, tables, queries.shape[2], attention)
        if is_gathered:
            is_all = at_hand is not None and _is_all(metadata, queries.shape[2])
            gathered = self._in_dtype(pages, at_hand) if is_all else None
            read = _sequences(gathered or self.gather(pages, metadata, unwritten), metadata)
            output = attend_by_sequence(
                read, queries, metadata, geometry.v_dim, attention, position_queries
            )
            # The step is also written when its output is computed.
            return mx.depends(output, self.order.latest(pages)) if is_all else output
        asked = [queries if dtype == own else queries.astype(own)]
        if position_queries is not None:
            asked.append(position_queries.astype(own))
        runs = None
        if (
            is_decode
            and position_queries is None
            and attention.read_tokens is not None  # not a call in each layer that reads all
            and chooses(attention, metadata, 1)
        ):
            runs = self._choose(pages, slabs, tables, asked[0], attention)
        unwritten = self._in_dtype(pages, unwritten)
        output = self._attention(pages, slabs, tables, asked, attention, step, unwritten, runs)
        if step is not None and geometry.has_summaries:
            self.summarise(pages, metadata.filled_entries(1))
        return output if dtype == own else output.astype(dtype)

    def _choose(
        self,
        pages: LayerMemory,
        slabs: BoundSlabs,
        tables: Tables,
        queries: mx.array,
        attention: Attention,
    ) -> mx.array:
        """The runs that queries [B, q_heads, 1, k_dim] in the pages' dtype read: int32 [B,
        kv_heads, read_tokens / 32], contiguous. Those of sequences that are read whole say nothing.
        MLX's operations choose by scores of all pages, lazily, so that a step can be recorded.
        """
        assert attention.read_tokens is not None
        shape, heads, scale = tables.array.shape, queries.shape[1], float(attention.scale)
        launch, params = self._score(slabs.kind, *shape, heads, scale, tables.reach)
        inputs = [queries, *slabs.inputs, tables.array, params]
        scores, _ = self.order.run(pages, launch, inputs)
        return mx.contiguous(chosen_runs(scores, tables.array[:, 0], attention.read_tokens))

    def _run(
        self,
        operation: str,
        pages: LayerMemory,
        slabs: BoundSlabs,
        table: mx.array,
        tokens: int,
        inputs: Sequence[mx.array] = (),
        new_tokens: int = 0,
    ) -> list[mx.array]:
        """Run a kernel that moves or summarises `tokens` tokens of each row of a table."""
        launch, params = self._launch(operation, slabs.kind, *table.shape, tokens, new_tokens)
        return self.order.run(pages, launch, [*inputs, *slabs.inputs, table, params])

    def _launch_of(
        self, operation: str, kind: PageKind, batch: int, width: int, tokens: int, new_tokens: int
    ) -> tuple[Launch, mx.array]:
        """The launch for a table [batch, width] with `tokens` tokens, or summaries, in each row.
        Each simdgroup moves a token's keys, or its values, of one head."""
        geometry = kind.geometry
        # A page that is written holds floats, whatever the others hold.
        flags = [] if operation in ("write", "summarise") else [*kind.flags]
        if operation == "copy" and geometry.has_summaries:
            flags.append("HAS_SUMMARIES")
        if new_tokens:
            flags.append("HAS_NEW_TOKENS")
        outputs = [
            Output((batch, geometry.k_heads, tokens, dim), geometry.k_dtype)
            for dim in kind.dims.values()
        ]
        sides = 1 if operation == "summarise" else 2
        is_read = operation in ("copy", "gather")
        probe = Probe(geometry, kind.formats if is_read else ("fp16",)).on_few_heads()
        options = {"new_tokens": new_tokens > 0} if operation == "gather" else {}
        with self._certified(partial(getattr(probe, operation), **options)):
            launch = self._kernels.launch(
                operation,
                geometry.k_dtype,
                kind.dims,
                flags,
                (-(-tokens // tuning.SLOT_SIMDGROUPS), geometry.k_heads, sides * batch),
                tuning.LANES * tuning.SLOT_SIMDGROUPS,
                [*outputs, DONE] if operation == "gather" else [DONE],
            )
        params = parameters(
            slab_stride=kind.slab_stride,
            table_stride=width,
            kv_heads=geometry.k_heads,
            steps=tokens,
            tokens=tokens,
            new_tokens=new_tokens,
        )
        return launch, params

    def _score_of(
        self, kind: PageKind, batch: int, width: int, heads: int, scale: float, reach: int
    ) -> tuple[Launch, mx.array]:
        """The launch that scores for tables [batch, width] of that reach."""
        geometry = kind.geometry
        group = heads // geometry.k_heads
        rows = tuning.scored_rows(group, geometry.k_dim)
        scores = batch, geometry.k_heads, group, reach // RUN_TOKENS
        probe = Probe(geometry, kind.formats, heads, 1, LEAST_READ_TOKENS + PAGE_SIZE + 44)
        with self._certified(partial(probe.attend, read_tokens=LEAST_READ_TOKENS)):
            launch = self._kernels.launch(
                "score",
                geometry.k_dtype,
                {"K_DIM": geometry.k_dim, "ROWS": rows, "SIMDGROUPS": tuning.SCORE_SIMDGROUPS},
                [],
                (
                    -(-reach // (PAGE_SIZE * tuning.SCORE_SIMDGROUPS)),
                    geometry.k_heads * -(-group // rows),
                    batch,
                ),
                tuning.LANES * tuning.SCORE_SIMDGROUPS,
                [Output(scores, mx.float32), DONE],
            )
        params = parameters(
            slab_stride=kind.slab_stride,
            table_stride=width,
            kv_heads=geometry.k_heads,
            gqa_group_size=group,
            scale=scale,
            tokens=reach,
        )
        return launch, params

    @contextmanager
    def _certified(self, check: Callable[[Backend], Check]) -> Iterator[None]:
        """Have the kernels that are made within checked, before they are used. Where the check is
        interrupted, they are made and checked at their next use.

        Raises:
            WrongKernel: a kernel of this device is wrong.
        """
        made, known = self._kernels.made, len(self._kernels.made)
        try:
            yield
            names = list(made)[known:]
            if names and self.verdicts is not None:
                self.verdicts.require(names, partial(self._failure, names, check))
        except BaseException:
            for name in list(made)[known:]:
                del made[name]
            raise

    def _failure(self, names: list[str], check: Callable[[Backend], Check]) -> str | None:
        """What is wrong with kernels, as a check finds that is to run the same ones."""
        other = GpuBackend(self.name, self._kernels.maker)
        failure = check(other).failure()
        if failure is None and not other._kernels.made.keys() >= set(names):
            return "its check ran other kernels"
        return failure

    def _is_gathered(
        self, geometry: LayerGeometry, tables: Tables, steps: int, attention: Attention
    ) -> bool:
        """Whether MLX attends to keys and values that a kernel gathers: where no kernel reads pages
        of this geometry, or MLX is quicker."""
        if (geometry.k_dim, geometry.v_dim) in LATENT_SIZES:
            return True
        return (
            steps >= tuning.GATHERED_STEPS[self.name]
            and max(geometry.k_dim, geometry.v_dim) <= tuning.LARGEST_FUSED_HEAD
            and attention.window is None
            and attention.softcap is None
            and tables.groups is None
        )

    def _bound(
        self, pages: LayerMemory, metadata: AttentionMetadata
    ) -> tuple[Tables, BoundSlabs | None]:
        """The tables and bound slabs of a batch; None for the slabs if no kernel takes them."""
        tables: Tables = metadata.memo.get(TABLES) or tables_of(metadata, pages.slab_stride)
        if len(tables.slabs) > MAX_SLABS or not pages.slabs or self.is_disabled:
            return tables, None
        return tables, pages.memo.get(tables.slabs) or bound_slabs(pages, tables.slabs)

    def _in_dtype(self, pages: LayerMemory, unwritten: Unwritten | None) -> Unwritten | None:
        if unwritten is None:
            return None
        keys, values = unwritten
        return keys.astype(pages.geometry.k_dtype), values.astype(pages.geometry.k_dtype)

    def _fall_back(self, pages: LayerMemory) -> None:
        """Count and log a fallback, and wait for the kernels before plain operations follow, which
        replace the slabs that they write: no handle of those stays."""
        self.fallbacks += 1
        if not self.is_disabled:
            warn_once(
                f"a batch has pages in more than {MAX_SLABS} slabs, because max_bytes leaves no "
                "room to join some, so plain MLX operations serve it, which are slower. Raise "
                "max_bytes, or call compact()"
            )
        self.synchronize(pages)
        pages.memo.clear()


class GpuRecorder(StepRecorder):
    """See `StepRecorder` for the operations.

    The launches of a step and their order are the same whether they are recorded or not: a
    placeholder runs the same code. It has arrays of `mx.compile` in the place of slabs, which
    kernels write in place, and of the token that kernels wait for.
    """

    pays = True

    def __init__(self, backend: GpuBackend) -> None:
        self._backend = backend

    @property
    def backend(self) -> GpuBackend:
        return self._backend

    def key(self, pages: LayerMemory, tables: Tables) -> Hashable:
        bound = bound_slabs(pages, tables.slabs)
        return bound.kind, bound.count

    def arrays(self, pages: LayerMemory, tables: Tables) -> list[mx.array]:
        return [*bound_slabs(pages, tables.slabs).handles, self.backend.order.latest(pages)]

    def set_arrays(
        self, placeholder: LayerMemory, pages: LayerMemory, tables: Tables, arrays: list[mx.array]
    ) -> None:
        *handles, token = arrays
        placeholder.slabs = pages.slabs
        placeholder.memo[tables.slabs] = bound_slabs(pages, tables.slabs).with_handles(handles)
        placeholder.kept = Chain(token, get_ident())

    def changes(self, tables: Tables) -> int:
        return 1

    def changed(self, placeholder: LayerMemory, tables: Tables) -> list[mx.array]:
        return [self.backend.order.latest(placeholder)]

    def keep(
        self, pages: LayerMemory, tables: Tables, changed: list[mx.array], filled: list[int]
    ) -> None:
        (token,) = changed
        self.backend.order.follow(pages, token)
        if pages.geometry.has_summaries:
            self.backend.summarise(pages, filled)


def _is_all(metadata: AttentionMetadata, count: int) -> bool:
    """Whether sequences have no tokens but those of a step of `count`."""
    tokens = metadata.valid_tokens(count)
    return all(map(eq, map(len, tokens), metadata.context_lens))


def _sequences(gathered: Unwritten, metadata: AttentionMetadata) -> Read:
    """Reads sequences from keys and values of all of them, which end together but for padding."""
    (keys, values), length = gathered, gathered[0].shape[2]

    def read(row: int) -> tuple[mx.array, mx.array]:
        own = slice(length - metadata.ends[row], length - metadata.right_padding[row])
        return keys[row : row + 1, :, own], values[row : row + 1, :, own]

    return read


def _numbered(entries: Sequence[int], stride: int) -> tuple[tuple[int, ...], list[int]]:
    """The slabs of these entries, ascending, and the entries if these slabs are numbered from 0."""
    slabs = sorted({entry // stride for entry in entries})
    places = {slab: at * stride for at, slab in enumerate(slabs)}
    return tuple(slabs), [places[entry // stride] + entry % stride for entry in entries]


def _table(rows: Sequence[tuple[int, ...]]) -> mx.array:
    """Rows of entries that number bound slabs, for a kernel that takes pages instead of tokens."""
    table = np.zeros((len(rows), TABLE_WIDTH), np.int32)
    table[:, : len(rows[0])] = rows
    return mx.array(table)
