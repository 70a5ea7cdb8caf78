"""The parts of a server that its routes share."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass, field

from paged_kv.server.completions.model_names import ModelNames
from paged_kv.server.completions.output_constraint import GrammarCompiler
from paged_kv.server.completions.short_hits import ShortHits, SystemTexts
from paged_kv.server.completions.tool_calls import CallParser
from paged_kv.server.completions.workers import WorkerThreads
from paged_kv.server.engine.generation_thread import GenerationThread
from paged_kv.server.engine.jobs import SessionEnd
from paged_kv.server.engine.paged_model_provider import LoadedModel
from paged_kv.server.engine.server_metrics import ServerMetrics
from paged_kv.server.http.access import Clients, Gate, KnownHosts
from paged_kv.server.http.api_errors import APIError
from paged_kv.server.options import ServerOptions

SESSIONS = "/v1/sessions"


@dataclass(frozen=True)
class Service:
    """One server.

    Attributes:
        place: names the server among several that share an address; empty for one alone.
    """

    options: ServerOptions
    thread: GenerationThread
    metrics: ServerMetrics
    names: ModelNames
    clients: Clients
    hosts: KnownHosts
    workers: WorkerThreads
    call_parser: CallParser
    grammars: GrammarCompiler
    gate: Gate
    place: str = ""
    system_texts: SystemTexts = field(default_factory=SystemTexts)
    short_hits: ShortHits = field(default_factory=ShortHits)

    @property
    def is_healthy(self) -> bool:
        """Whether the generation thread is alive, and its step does not hang."""
        return self.thread.is_alive and not self.thread.watch.is_hanging

    @property
    def is_ready(self) -> bool:
        """Whether a request that arrived now would be served."""
        return self.is_healthy and self.gate.is_open and self.thread.loaded.done()

    async def loaded(self) -> LoadedModel | None:
        """Wait for the first model to load; returns the loaded model, if there is one.

        Raises:
            APIError: 503, the model cannot be loaded, the server is shutting down, or the
                generation thread has died.
        """
        try:
            await self.gate.while_open(asyncio.wrap_future(self.thread.loaded))
        except APIError:
            raise
        except Exception as error:
            raise APIError(503, f"no model could be loaded: {error}", code="dead") from error
        self.require_healthy()
        return self.thread.provider.loaded

    async def end_session(self, name: str, salt: Hashable) -> int:
        """End a session of prompts with a salt, and free what only these have cached; returns how
        many blocks' worth of tokens that frees.

        Raises:
            APIError: 503, or 404 if there is no such session.
        """
        with self.gate.entered():
            await self.loaded()
            ended = SessionEnd(name, salt)
            self.thread.end_session(ended)
            self.require_healthy()
            # The thread answers also where nobody waits any more.
            return await asyncio.shield(asyncio.wrap_future(ended.freed))

    def require_healthy(self) -> None:
        """Raise APIError 503 if the generation thread has died."""
        if not self.thread.is_alive:
            raise APIError(503, "the generation thread has died", code="dead")
