"""mlx-lm's HTTP server on paged caches."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from mlx_lm import server
from mlx_lm.generate import BatchGenerator

from paged_kv.integrations.admission import (
    Admission,
    RequestImpossible,
    RequestRefused,
    ServerBusy,
)
from paged_kv.integrations.paged_model_provider import PagedModelProvider
from paged_kv.integrations.paged_prompt_cache import PagedPromptCache
from paged_kv.integrations.promising_batch import PromisingBatch
from paged_kv.integrations.salted_tokens import SaltedTokens
from paged_kv.integrations.shared_prefill import cut_for_snapshots
from paged_kv.integrations.status_page import answer_for


class PagedResponseGenerator(server.ResponseGenerator):
    """mlx-lm's, which begins a request only when there is memory for all that it may become.

    An exception in a step ends mlx-lm's generation thread, so nothing may be inserted into a batch
    that could exhaust a pool. All of this runs on the generation thread but `generate`.
    """

    model_provider: PagedModelProvider

    def __init__(self, model_provider: PagedModelProvider) -> None:
        arguments = model_provider.cli_args
        self.admission: Admission[Any] = Admission(self._tokens_of, arguments.admission_timeout)
        # The request whose turn it is, tokenized.
        self._tokenized: tuple[Any, Any] = (None, None)
        prompt_cache: Any = PagedPromptCache(
            model_provider, arguments.prompt_cache_size, arguments.prompt_cache_bytes
        )
        # Starts the generation thread.
        super().__init__(model_provider, prompt_cache)

    def generate(self, request: Any, generation_args: Any, progress_callback: Any = None) -> Any:
        """See mlx-lm's; called by the threads of clients.

        Raises:
            Refusal: the request was refused before anything was done for it.
        """
        try:
            return super().generate(request, generation_args, progress_callback)
        except RequestRefused as refused:
            raise Refusal(refused) from None

    def _generate(self) -> None:
        with _batches_of(partial(PromisingBatch, admission=self.admission)):
            super()._generate()  # type: ignore[no-untyped-call]

    def _next_request(self, timeout: float | None = None) -> Any:
        """The request that may begin now, or None."""
        arrived = self._arrived(None if len(self.admission) else timeout)
        while arrived is not None:
            self.admission.arrive(arrived)
            arrived = self._arrived(None)
        self.admission.pools = self.model_provider.pool_sizes()
        for answers, _, _ in self.admission.late():
            answers.put(self.admission.busy())
        return self.admission.next()

    def _arrived(self, timeout: float | None) -> Any:
        return super()._next_request(timeout)  # type: ignore[no-untyped-call]

    def _tokens_of(self, arrived: Any) -> int | None:
        """The most tokens that a request may hold, or None if it will not join a batch: then the
        batch ends first, and it is served alone."""
        _, request, args = arrived
        is_batchable = self._is_batchable(args)  # type: ignore[no-untyped-call]
        is_alone = not is_batchable or any(server._image_parts(request.messages))
        if is_alone or not self.model_provider.is_loaded(args.model):
            return None
        if self._tokenized[0] is not request:
            try:
                self._tokenized = request, self._tokens_and_segments(request, args)
            except Exception:
                # It fails again, and the client is told, when its turn has come.
                return None
        return int(len(self._tokenized[1][0]) + args.max_tokens)

    def _tokens_and_segments(self, request: Any, args: Any) -> Any:
        """What mlx-lm makes of a prompt: its tokens, with the salt of the request, and the parts
        after each of which it keeps the cache."""
        tokens, segments, kinds, state, vision = super()._tokenize(  # type: ignore[no-untyped-call]
            self.model_provider.tokenizer, request, args
        )
        if any(factory.prefixes.has_states for factory in self.model_provider.factories):
            segments, kinds = cut_for_snapshots(segments, kinds)
        salt = request.cache_salt
        if vision is not None:
            vision.cache_key = SaltedTokens(vision.cache_key, salt)
        return SaltedTokens(tokens, salt), segments, kinds, state, vision

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        """Tokenize a request that is about to begin.

        Raises:
            RequestImpossible: it has no tokens, or more than there is memory for.
        """
        known, tokenized = self._tokenized
        self._tokenized = None, None
        if known is not request:
            tokenized = self._tokens_and_segments(request, args)
        prompt = tokenized[0]
        if not prompt:
            raise RequestImpossible("the prompt has no tokens: give at least one")
        # The model may have been loaded for this request.
        self.admission.pools = self.model_provider.pool_sizes()
        drafted = args.num_draft_tokens + 1 if self.model_provider.draft_model else 0
        self.admission.require_possible(len(prompt), args.max_tokens, drafted)
        return tokenized


class Refusal(BaseException):
    """Carries a RequestRefused past mlx-lm's handler, which would answer any Exception with 404."""

    def __init__(self, refused: RequestRefused) -> None:
        super().__init__(refused)
        self.refused = refused


class PagedAPIHandler(server.APIHandler):
    """mlx-lm's, which says why a request was refused, and shows what the pools hold."""

    def do_GET(self) -> None:
        """See mlx-lm's, and `status_page`."""
        answer = answer_for(self.path)
        if answer is None:
            super().do_GET()  # type: ignore[no-untyped-call]
            return
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer.content)

    def do_POST(self) -> None:
        """See mlx-lm's."""
        try:
            super().do_POST()  # type: ignore[no-untyped-call]
        except Refusal as refusal:
            self._answer(refusal.refused)

    def handle_chat_completions(self) -> Any:
        """See mlx-lm's."""
        return self._salted(super().handle_chat_completions())

    def handle_text_completions(self) -> Any:
        """See mlx-lm's."""
        return self._salted(super().handle_text_completions())

    def _salted(self, request: Any) -> Any:
        """A request that knows the `cache_salt` of its body: prompts are shared among requests of
        the same salt.

        Raises:
            Refusal: it is not a string, or empty.
        """
        salt = self.body.get("cache_salt")
        if salt is not None and not (isinstance(salt, str) and salt):
            wrong = f"cache_salt must be a string that is not empty, got {salt!r}"
            raise Refusal(RequestImpossible(wrong))
        request.cache_salt = salt
        return request

    def _answer(self, refused: RequestRefused) -> None:
        logging.warning("refused with %d: %s", refused.status, refused)
        is_busy = isinstance(refused, ServerBusy)
        error = {
            "message": str(refused),
            "type": "server_error" if is_busy else "invalid_request_error",
            "code": refused.status,
        }
        self._set_completion_headers(refused.status)
        if isinstance(refused, ServerBusy):
            self.send_header("Retry-After", str(refused.retry_after_s))
        self.end_headers()
        self.wfile.write(json.dumps({"error": error}).encode())


def serve(model_provider: PagedModelProvider, host: str, port: int) -> None:
    """Serve until the process is interrupted.

    Raises:
        OSError: there is no such host, or the port is in use.
    """
    generator = PagedResponseGenerator(model_provider)
    try:
        server._run_http_server(host, port, generator, handler_class=PagedAPIHandler)
    finally:
        # The process would wait for its thread for ever.
        generator.stop_and_join()  # type: ignore[no-untyped-call]
        # What is known goes to disk, if it is to.
        model_provider.reset()


@contextmanager
def _batches_of(kind: Any) -> Iterator[None]:
    """Let mlx-lm's server make its batches with `kind`: it has no other way to be told."""
    name = BatchGenerator.__name__
    stock = vars(server)[name]
    setattr(server, name, kind)
    try:
        yield
    finally:
        setattr(server, name, stock)
