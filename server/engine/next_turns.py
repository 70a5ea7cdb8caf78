"""Computes what the next turns of chats begin with, while no request is there.

An answer leaves in the cache what the model has written. The next prompt of its chat has the answer
as the chat template writes it: without the thoughts, say, or with calls in another form. So the
prompt would find nothing behind the place where the two part. Between the two turns the machine
idles: it computes the part that is sure to come, up to where the next message begins.

This is a guess that costs other requests nothing:

    when      no request is there; one that comes waits for the end of a piece at most
    memory    what is free, or holds prefixes that are worth less than a new one
    energy    none from a battery
    use       it ends for good when later prompts find too little of what was computed
"""

from __future__ import annotations

import logging
import subprocess
import sys
from array import array
from collections import deque
from collections.abc import Callable, Generator, Hashable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from paged_kv.allocator.prefixes.prefix_index import common_prefix
from paged_kv.integrations.states.counted_states import are_ours
from paged_kv.kernels.pages.page_format import PAGE_SIZE
from paged_kv.prefix.keeping import LookedUp, inner_salt
from paged_kv.server.engine.jobs import Job
from paged_kv.server.engine.paged_model_provider import LoadedModel, ModelKey, PagedModelProvider
from paged_kv.server.engine.server_metrics import ServerMetrics
from paged_kv.server.engine.single_row import PromptStart

log = logging.getLogger(__name__)

# Seconds without a request before a turn is prepared: a client that asks again at once would wait
# for a piece.
QUIET_S = 0.25
# Tokens that are computed before the next look for requests.
PIECE_TOKENS = PAGE_SIZE
# Each holds the body of a request.
MOST_WAITING = 16
# Prepared prefixes that later prompts are compared with.
MOST_PREPARED = 64
# After so many prepared prefixes, later prompts must have found this share of their tokens.
JUDGED, LEAST_FOUND = 100, 0.1

_BATTERY_S = 60.0
_POWER = Path("/sys/class/power_supply")


@dataclass(eq=False)
class NextTurn:
    """The turn that follows the answer to a request."""

    request_id: str
    model: ModelKey
    salt: Hashable
    session: str | None
    # Makes the tokens that the next prompt begins with; may be slow.
    read: Callable[[LoadedModel], list[int]]
    tokens: list[int] | None = None  # these, once they were read


class _Prepared(NamedTuple):
    """A prefix that no prompt has found yet; its tokens behind the first `begin` were computed."""

    tokens: array[int]
    begin: int
    salt: Hashable


class NextTurns:
    """The next turns that are to be prepared. The latest comes first. All methods but `add` run on
    the generation thread."""

    def __init__(self, provider: PagedModelProvider, metrics: ServerMetrics) -> None:
        # Several ranks would have to agree on each piece.
        self.is_on = provider.options.prepare_next == "on" and provider.ranks.size == 1
        self._provider = provider
        self._metrics = metrics
        self._waiting: deque[NextTurn] = deque(maxlen=MOST_WAITING)
        self._turn: NextTurn | None = None
        self._steps: Generator[None] | None = None
        self._prepared: deque[_Prepared] = deque()
        self._judged = self._tokens = self._found = 0
        self._is_on_battery, self._asked_at = False, -_BATTERY_S

    @property
    def has_work(self) -> bool:
        """Whether a turn waits or is being prepared."""
        return bool(self._waiting) or self._turn is not None

    def add(self, turn: NextTurn) -> None:
        """Prepare a turn when there is time. Any thread may call this."""
        if self.is_on:
            self._waiting.append(turn)

    def step(self, now: float) -> None:
        """Compute a piece; `now` is in seconds. A turn that fails is given up: its prompt will be
        computed when it comes."""
        if self._steps is None:
            self._turn = self._waiting[-1]  # before it waits no more: there is work all the time
            self._waiting.remove(self._turn)
            self._steps = self._prepare(self._turn, now)
        try:
            next(self._steps)
            return
        except StopIteration:
            pass
        except Exception as error:
            self._log_failure(error)
        self._turn = self._steps = None

    def pause(self) -> None:
        """Keep what is computed of a turn, as a request has come; the rest waits."""
        if self._steps is None or self._turn is None:
            return
        try:
            self._steps.close()
            self._waiting.append(self._turn)
        except Exception as error:
            self._log_failure(error)
        self._turn = self._steps = None

    def clear(self) -> None:
        """Keep what is computed, and forget what waits."""
        self.pause()
        self._waiting.clear()

    def end_session(self, session: str, salt: Hashable) -> None:
        self.pause()
        for turn in list(self._waiting):
            if (turn.session, inner_salt(turn.salt)) == (session, salt):
                self._waiting.remove(turn)

    def record_begun(self, job: Job) -> None:
        """Count what a prompt that begins has found of prepared prefixes."""
        if job.prompt is None or job.prompt.media is not None:
            return
        tokens, salt = array("I", job.prompt.tokens), inner_salt(job.salt)
        for each in [each for each in self._prepared if each.salt == salt]:
            begin, end = each.begin, job.cached_tokens
            if tokens[:begin] == each.tokens[:begin]:
                found = common_prefix(tokens[begin:end], each.tokens[begin:])
                if found:
                    self._prepared.remove(each)
                    self._judge(each, found)

    def _prepare(self, turn: NextTurn, now: float) -> Generator[None]:
        """Compute what is not cached of a turn, a piece at a time. What is computed is kept when
        this ends, also if a request ends it."""
        loaded = self._provider.described
        if turn.model != loaded.key:
            return
        if now - self._asked_at >= _BATTERY_S:
            self._asked_at, self._is_on_battery = now, is_on_battery()
        if self._is_on_battery:
            return
        if turn.tokens is None:
            turn.tokens = turn.read(loaded)
            yield
        tokens, (factory, *_) = turn.tokens, self._provider.factories
        if factory.pool.is_reproducible:
            # Prompts find whole pages only.
            tokens = tokens[: len(tokens) // PAGE_SIZE * PAGE_SIZE]
        known = factory.peek(tokens, salt=turn.salt).num_tokens
        if known >= len(tokens) - 1 or not factory.has_room(tokens, salt=turn.salt):
            return
        # It is no use of what it finds.
        cache, begin = factory.fetch_cache(tokens, salt=LookedUp(turn.salt))
        model: Any = self._provider.model
        start, done = PromptStart(model, cache, begin, [len(tokens)]), begin
        try:
            for end in start.steps(tokens, PIECE_TOKENS, can_repeat=are_ours(cache)):
                done = end
                yield
        except GeneratorExit:
            pass
        if done > begin:
            self._keep(turn, tokens[:done], begin, cache)

    def _keep(self, turn: NextTurn, tokens: list[int], begin: int, cache: list[Any]) -> None:
        self._provider.reuse.insert(tokens, cache, turn.salt, turn.session)
        count = len(tokens) - begin
        self._metrics.prepared_tokens += count
        self._prepared.append(_Prepared(array("I", tokens), begin, inner_salt(turn.salt)))
        if len(self._prepared) > MOST_PREPARED:
            self._judge(self._prepared.popleft(), 0)
        log.info("%s: %d tokens of its next turn are prepared", turn.request_id, count)

    def _log_failure(self, error: Exception) -> None:
        name = None if self._turn is None else self._turn.request_id
        log.warning("%s: its next turn is not prepared: %r", name, error)

    def _judge(self, prepared: _Prepared, found: int) -> None:
        """Count what was found of a prefix, and stop if that is too little of the latest ones."""
        count = len(prepared.tokens) - prepared.begin
        self._metrics.prepared_found += found
        self._metrics.prepared_unused += count - found
        self._judged, self._tokens = self._judged + 1, self._tokens + count
        self._found += found
        if self._judged < JUDGED:
            return
        if self._found < LEAST_FOUND * self._tokens:
            self.is_on = False
            self._waiting.clear()
            log.warning(
                "next turns are not prepared any more: prompts found %d of %d tokens. Clients "
                "change what they send back, or their chats end with one answer",
                self._found,
                self._tokens,
            )
        self._judged = self._tokens = self._found = 0


def is_on_battery(power: Path = _POWER) -> bool:
    """Whether the system says that this machine runs on its battery. Linux describes power supplies
    in a folder (its Documentation/ABI/testing/sysfs-class-power); macOS answers `pmset -g batt`."""
    if sys.platform == "darwin":
        asked = ["/usr/bin/pmset", "-g", "batt"]
        with suppress(OSError, subprocess.TimeoutExpired):
            told = subprocess.run(asked, capture_output=True, text=True, timeout=2, check=False)
            return "'Battery Power'" in told.stdout
        return False
    return any(map(_discharges, power.glob("*")))


def _discharges(supply: Path) -> bool:
    """Whether a power supply is a battery of this machine, not of a mouse, and gives power."""

    def told(name: str) -> str:
        with suppress(OSError):
            return (supply / name).read_text().strip()
        return ""

    is_own = told("type") == "Battery" and told("scope") != "Device"
    return is_own and told("status") == "Discharging"
