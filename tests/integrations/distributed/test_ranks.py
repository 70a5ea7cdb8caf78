"""How ranks agree and fail, without processes: each rank is a thread."""

import hmac
import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator

from paged_kv import PagedCacheFactory, PagedKVCache, PagePool, PoolExhausted, Sequence
from paged_kv.integrations.batching.preemption import Preemption
from paged_kv.integrations.distributed import connections
from paged_kv.integrations.distributed import watch as watch_module
from paged_kv.integrations.distributed.connected_ranks import ConnectedRanks, RanksDiffer
from paged_kv.integrations.distributed.connections import (
    MOST_NEWCOMERS,
    Meeting,
    NotConnected,
    accept,
    connect,
)
from paged_kv.integrations.distributed.sharded_model import (
    agreed_budget,
    digest,
    require_same_prefixes,
)
from paged_kv.integrations.distributed.watch import Heartbeat, Leave, Watch, hanging
from paged_kv.prefix.prefix_cache import PrefixCache
from paged_kv.ranks import ALONE, Ranks
from tests.support.zoo import small_model

KEY = b"a key of thirty-two bytes, or so"
FOREVER_S = 1e6


def star(size: int) -> list[dict[int, Connection]]:
    """For each rank its connections: on rank 0 to all others, elsewhere to rank 0."""
    pairs = [Pipe() for _ in range(1, size)]
    hub = {rank: pair[0] for rank, pair in enumerate(pairs, 1)}
    return [hub, *[{0: pair[1]} for pair in pairs]]


def on_ranks(size: int, work: Callable[[Ranks], Any]) -> list[Any]:
    """What some work returns on each rank, or the error that it raises."""
    watches = [Watch(rank, its, FOREVER_S) for rank, its in enumerate(star(size))]
    ranks = [ConnectedRanks(rank, size, its, watches[rank]) for rank, its in enumerate(star(size))]

    def outcome(each: Ranks) -> Any:
        try:
            return work(each)
        except RanksDiffer as error:
            return error

    with ThreadPoolExecutor(size) as threads:
        found = list(threads.map(outcome, ranks))
    leave(watches)
    return found


def leave(watches: list[Watch]) -> None:
    """Let all ranks leave at once."""
    with ThreadPoolExecutor(len(watches)) as threads:
        list(threads.map(Watch.leave, watches))


def test_ranks_that_ask_different_questions_all_fail_with_both() -> None:
    def work(ranks: Ranks) -> Any:
        ranks.gather("budget", 1)
        return ranks.gather("prefix" if ranks.rank == 1 else "room", 1)

    for error in on_ranks(3, work):
        assert isinstance(error, RanksDiffer)
        assert "rank 0 asks for 'room', rank 1 asks for 'prefix'" in str(error)
        assert "question 2" in str(error)


def test_two_threads_of_a_rank_may_not_ask_at_once() -> None:
    hub, other = star(2)
    watches = [Watch(rank, its, FOREVER_S) for rank, its in enumerate(star(2))]
    ranks = ConnectedRanks(0, 2, hub, watches[0])
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(ranks.gather, "first", 1)
        while ranks.watch.doing != "waiting":
            assert not waiting.done()
        with pytest.raises(RuntimeError, match="use it from one thread"):
            ranks.gather("second", 2)
        other[0].send(("first", 3))
        assert waiting.result() == [1, 3]
    leave(watches)


@contextmanager
def listener(**options: Any) -> Iterator[tuple[Any, Meeting, ThreadPoolExecutor]]:
    """Where rank 0 listens, how others find it, and a thread."""
    with (
        socket.create_server(("127.0.0.1", 0), **options) as listening,
        ThreadPoolExecutor(1) as thread,
    ):
        yield listening, Meeting(["127.0.0.1"], listening.getsockname()[1], KEY), thread


# What a client says that is no rank; None for one that leaves.
NOISE = [b"", b"half", b"\0" * 200, b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", None]


def noisy(port: int, count: int) -> list[socket.socket]:
    """Clients of rank 0 that are no ranks."""
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    for at, client in enumerate(clients):
        noise = NOISE[at % len(NOISE)]
        if noise is None:
            client.close()
        else:
            client.sendall(noise)
    return clients


def test_clients_that_say_nothing_or_half_of_it_keep_no_rank_out() -> None:
    with listener(backlog=MOST_NEWCOMERS) as (listening, meeting, thread):
        clients = noisy(meeting.port, 10)
        accepted = thread.submit(accept, listening, KEY, range(1, 3), FOREVER_S)
        first = connect(meeting, 1)
        clients += noisy(meeting.port, 2 * MOST_NEWCOMERS)
        second = connect(meeting, 2)
        its_ends = accepted.result()
        for rank, connection in ((1, first), (2, second)):
            its_ends[rank].send(rank)
            assert connection.recv() == rank
        for client in clients:
            client.close()


def test_a_client_that_proves_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "PROOF_S", 0.05)
    with listener() as (listening, meeting, thread):
        accepted = thread.submit(accept, listening, KEY, range(1, 2), FOREVER_S)
        with socket.create_connection(("127.0.0.1", meeting.port)) as silent:
            while silent.recv(1000):
                pass  # the challenge; then the end
        assert not accepted.done()
        monkeypatch.undo()
        connect(meeting, 1)
        accepted.result()


def test_who_does_not_know_the_key_is_no_rank() -> None:
    with listener() as (listening, meeting, thread):
        accepted = thread.submit(accept, listening, KEY, [1], FOREVER_S)
        with pytest.raises(NotConnected, match="rank 1 cannot reach"):
            connect(replace(meeting, key=KEY[::-1]), 1)
        assert not accepted.done()
        connect(meeting, 1)
        accepted.result()


def test_what_rank_0_sends_right_behind_its_proof_is_a_message() -> None:
    with listener() as (listening, meeting, thread):
        connected = thread.submit(connect, meeting, 1)
        with listening.accept()[0] as rank_0:
            challenge = b"c" * 32
            rank_0.sendall(challenge)
            proof = b""
            while len(proof) < 68:
                proof += rank_0.recv(68 - len(proof))
            digest = hmac.digest(KEY, b"rank 0\0\0" + proof[4:36] + challenge, "sha256")
            # As `Connection.send_bytes` does: the length comes first.
            rank_0.sendall(digest + struct.pack("!i", 5) + b"hello")
            assert connected.result().recv_bytes() == b"hello"


@pytest.mark.parametrize("said", [b"", b"half", b"\0" * 64])
def test_a_rank_gives_up_what_answers_as_no_rank_does(
    monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(connections, "PROOF_S", 0.05)
    with listener() as (listening, meeting, thread):
        connected = thread.submit(connect, meeting, 1)
        with listening.accept()[0] as other:
            other.sendall(said)
            with pytest.raises(NotConnected, match="rank 1 cannot reach rank 0"):
                connected.result()


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ([(7, "waiting", 9), (6, "computing", 9)], "rank 1 has kept the others"),
        ([(7, "waiting", 9), (7, "", 9)], "rank 1 has kept the others"),
        ([(7, "computing", 9), (7, "waiting", 9), (6, "", 1)], "rank 0, 2 has kept"),
        ([(7, "computing", 9), (7, "computing", 8)], "a step has taken more than"),
    ],
)
def test_the_rank_for_which_the_others_wait_is_named(told: list[Any], message: str) -> None:
    heartbeats = {rank: Heartbeat(*each) for rank, each in enumerate(told)}
    assert message in hanging(heartbeats, 5)


class AnsweringRanks(Ranks):
    """A rank beside another one, which gives these answers by question, and otherwise the same."""

    size = 2

    def __init__(self, **answers: Any) -> None:
        self._answers = answers

    def gather(self, question: str, answer: Any) -> list[Any]:
        return [answer, self._answers.get(question, answer)]


class LesserRanks(AnsweringRanks):
    """The same, with answers that are no larger than ours."""

    def gather(self, question: str, answer: Any) -> list[Any]:
        return [answer, min(super().gather(question, answer))]


def test_a_budget_is_the_smallest_of_all_ranks() -> None:
    ranks = LesserRanks(max_bytes=1_600_000)
    assert agreed_budget("64MB", ranks) == 1_600_000
    assert agreed_budget(1_000_000, ranks) == 1_000_000


def test_a_prefix_hit_is_the_shortest_of_all_ranks() -> None:
    tokens = list(range(600))
    for other in (600, 400, 255, 0):
        pool = PagePool(1, max_bytes=1 << 22)
        prefixes = PrefixCache(pool, has_states=False, ranks=LesserRanks(prefix=other))
        sequence = Sequence(pool)
        PagedKVCache(pool, 0, [sequence]).update_and_fetch(*[mx.zeros((1, 1, 600, 4))] * 2)
        prefixes.insert("everyone", tokens, sequence, None)
        found = prefixes.fetch("everyone", [*tokens, 1], pool.page_format)
        assert found.num_tokens == found.sequence.length == other
        pool.check()


def test_ranks_that_cache_different_prefixes_fail_with_both() -> None:
    def pool_with(tokens: list[int]) -> PagePool:
        pool = PagePool(1, max_bytes=1 << 22)
        sequence = Sequence(pool)
        keys = mx.zeros((1, 1, len(tokens), 4))
        PagedKVCache(pool, 0, [sequence]).update_and_fetch(keys, keys)
        PrefixCache(pool, has_states=False).insert("all", tokens, sequence, None)
        return pool

    pools = [pool_with([1, 2, 3]), pool_with([1, 2, 4])]
    same = on_ranks(2, lambda ranks: require_same_prefixes(ranks, pools[0]))
    assert same == [None, None]
    for error in on_ranks(2, lambda ranks: require_same_prefixes(ranks, pools[ranks.rank])):
        assert isinstance(error, RanksDiffer)
        assert digest(pools[0]) in str(error)
        assert digest(pools[1]) in str(error)


def test_stored_pages_are_loaded_only_where_all_ranks_offer_them(tmp_path: Path) -> None:
    model, tokens = small_model("qwen3"), list(range(100)) * 7

    def cached(ranks: Ranks) -> int:
        factory = PagedCacheFactory(model, max_bytes="64MB", store=tmp_path / "store")
        factory.prefixes.ranks = ranks
        cache, known = factory.fetch_cache(tokens)
        if not known:
            model(mx.array([tokens]), cache=cache)
            factory.insert_cache(tokens, cache)
        del cache
        factory.close()
        return known

    assert cached(ALONE) == 0
    assert cached(ALONE) == 512
    # Pages that both ranks have are loaded.
    assert cached(OtherStores(256)) == 256
    assert cached(OtherStores(None)) == 0
    assert cached(OtherStores(512, is_readable=False)) == 0


class OtherStores(Ranks):
    """A rank beside another one with other stored pages: from the second question on it offers the
    same. Where it cannot read, it has nothing more to offer."""

    size = 2

    def __init__(self, offer: Any, *, is_readable: bool = True) -> None:
        self._offers = [offer]
        self._is_readable = is_readable

    def gather(self, question: str, answer: Any) -> list[Any]:
        if question == "readable" and not self._is_readable:
            self._offers.append(None)
            return [answer, False]
        if question == "stored prefix" and self._offers:
            return [answer, self._offers.pop()]
        return [answer, answer]


@pytest.mark.parametrize("has_room", [True, False])
def test_a_sequence_begins_where_every_rank_has_room(has_room: bool) -> None:
    model = small_model("qwen3")
    factory = PagedCacheFactory(model, max_bytes="64MB")
    factory.ranks = AnsweringRanks(room=has_room, ended=False)
    with factory:
        generator = BatchGenerator(model)
        generator.insert([[1, 2, 3], [4, 5, 6]], max_tokens=[2, 2])
        together = [len(generator.next_generated()) for _ in range(2)]
        generator.close()
    assert together == ([2, 2] if has_room else [1, 1])


def test_a_batch_is_short_of_memory_where_one_rank_is() -> None:
    model = small_model("qwen3")
    factory = PagedCacheFactory(model, max_bytes="64MB")
    its_error = PoolExhausted(1, 0, 0, 100, 10)
    factory.ranks = AnsweringRanks(blocks=its_error, ended=False)
    with factory:
        generator = BatchGenerator(model)
        generator.insert([[1, 2, 3]], max_tokens=[2])
        with pytest.raises(PoolExhausted) as raised:
            generator.next_generated()
        generator.close()
    assert raised.value is its_error


def test_a_rank_tries_again_where_another_has_taken_pages_back() -> None:
    model = small_model("qwen3")
    factory = PagedCacheFactory(model, max_bytes="64MB")
    generator = BatchGenerator(model)
    for has_taken in (True, False):
        factory.ranks = AnsweringRanks(ended=has_taken)
        assert Preemption(generator, factory)._take_back() is has_taken
    generator.close()


def test_ranks_do_not_answer_each_beat_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """That would be answered too, and idle ranks would never rest."""
    monkeypatch.setattr(watch_module, "HEARTBEAT_S", FOREVER_S)
    own, other = Pipe()
    watch = Watch(0, {1: own}, FOREVER_S)
    for exchange in range(5):
        other.send(Heartbeat(exchange, "", 0.0))
    other.send(Leave())
    received = [other.recv()]
    while not isinstance(received[-1], Leave):
        received.append(other.recv())
    watch._thread.join()
    assert [type(each) for each in received] == [Heartbeat, Leave]
