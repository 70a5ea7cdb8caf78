"""Turns prompts from clients into tokens, with mlx-lm's chat templates and segments. Refuses those
of more tokens than a model was made for, and limits answers to its context."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import mlx.core as mx
from mlx_lm import server
from mlx_lm.server import GenerationArguments

from paged_kv.allocator.prefixes.prefix_index import common_prefix
from paged_kv.integrations.batching.prompt_segments import cut_at, cut_for_snapshots
from paged_kv.integrations.mlx_lm_internals import tokenized
from paged_kv.kernels.pages.errors import warn_once
from paged_kv.kernels.pages.page_format import PAGE_SIZE
from paged_kv.server.completions.chat_messages import (
    copied,
    image_files,
    inline_image_urls,
    require_no_marks,
    require_parts,
    typed_mark,
)
from paged_kv.server.completions.interface import Mark
from paged_kv.server.engine.chat_templates import KeptTokens, only_renders, template_text
from paged_kv.server.engine.jobs import HeldPrompt, Prompt
from paged_kv.server.engine.paged_model_provider import LoadedModel
from paged_kv.server.engine.single_row import EmbeddedImages
from paged_kv.server.http.api_errors import APIError, wrong_value
from paged_kv.server.http.schema import ChatBody
from paged_kv.server.options import ServerOptions


def _continued(body: ChatBody) -> str | None:
    """The text of a chat's last message, if the answer continues it: unless the request says
    something else, one of the assistant's with a text and without calls. Raises APIError 400: the
    last message is to be continued and is no such message."""
    last, is_continued = body.messages[-1], body.continue_final_message
    content: Any = last.get("content") or ""
    if not isinstance(content, str):  # as mlx-lm writes parts together
        content = "".join(part.get("text") or "" for part in content if part["type"] == "text")
    is_open = last["role"] == "assistant" and not last.get("tool_calls") and bool(content)
    if is_continued is None:
        is_continued = is_open and body.add_generation_prompt is not True
    elif is_continued and not is_open:
        raise wrong_value(
            "continue_final_message: the last message must be the assistant's, with a text and "
            "without tool_calls",
            "continue_final_message",
        )
    elif is_continued and body.add_generation_prompt:
        raise wrong_value(
            "continue_final_message and add_generation_prompt: an answer cannot continue the last "
            "message and begin another: leave out one of the two",
            "continue_final_message",
        )
    return content if is_continued else None


# A tokenizer takes 260 bytes of memory for each token, or 2 GB for a body of 8 MB: longer texts are
# first counted in pieces, up to the limit.
PIECE_CHARACTERS = 100_000

# More than a cut adds: the first token of a prompt, and a word or a special token in parts.
CUT_TOKENS = 64

_AT_LEAST = " (no more was counted)"


class LimitedTokenizer:
    """A tokenizer of mlx-lm for one prompt, which a field `param` holds. It refuses texts that are
    too long, before it makes tokens of them, and can end chats within their last message, or behind
    it.

    Args:
        options: of the server; `max_prompt_tokens` replaces the model's context length.
        salt: of the prompt; tokens that others' chats have left serve only the same.
        is_counted: whether the prompt is only counted, so that it may have any length.
        continued: the text of a chat's last message, which the answer continues.
        begins_turn: whether a chat says whose turn it is.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        options: ServerOptions,
        param: str,
        *,
        salt: Hashable = None,
        is_counted: bool = False,
        continued: str | None = None,
        begins_turn: bool = True,
    ) -> None:
        self.param = param
        self._tokenizer = loaded.tokenizer
        self._kept = loaded.kept_tokens
        self._salt = salt
        self._is_counted = is_counted
        self._continued, self._begins_turn = continued, begins_turn
        self._option: int | None = options.max_prompt_tokens
        self._most = None if is_counted else self._option or loaded.context_length

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, **named: Any) -> list[int]:
        """The tokens of a text; of a chat without a template, in which every message is written
        out, too. Raises APIError 400: it has too many."""
        if self._continued is not None:
            text = text[: text.rindex(self._continued) + len(self._continued)]
        return self._limited(text, **named)

    def _limited(self, text: str, **named: Any) -> list[int]:
        self._require_text(text)
        tokens: list[int] = self._tokenizer.encode(text, **named)
        return tokens

    def apply_chat_template(self, messages: Any, *, tokenize: bool, **named: Any) -> Any:
        """The tokens of a conversation. Raises APIError 400: it has too many."""
        if named.get("add_generation_prompt") and not self._begins_turn:
            named["add_generation_prompt"] = False
            if self._continued is not None:
                named["continue_final_message"] = True
        render = self._tokenizer.apply_chat_template
        if tokenize and self._kept is not None and only_renders(named):
            return self._joined(self._kept, render(messages, tokenize=False, **named))
        length = sum(len(message.get("content") or "") for message in messages)
        if tokenize and length > PIECE_CHARACTERS:
            text = render(messages, tokenize=False, **named)
            self._require_text(text)
            if self._is_counted:
                return list(chain.from_iterable(self._pieces(text)))
        return render(messages, tokenize=tokenize, **named)

    def _joined(self, kept: KeptTokens, text: str) -> list[int]:
        """The tokens of a chat's text, by its parts."""
        tokens: list[int] = []
        encode = partial(self._limited, add_special_tokens=False)
        for part in kept.parts(text):
            self.require(len(tokens), _AT_LEAST)
            if self._is_counted and len(part) > PIECE_CHARACTERS:
                tokens.extend(chain.from_iterable(self._pieces(part)))
            else:
                tokens.extend(kept.tokens(part, self._salt, encode))
        return tokens

    def require(self, tokens: int, about: str = "") -> None:
        """Raise APIError 400 if so many tokens are too many; `about` tells how they were
        counted."""
        if self._most is None or tokens <= self._most:
            return
        whose = "of this server" if self._option else "context length of this model"
        raise _too_long(
            tokens,
            self._most,
            f"{whose}{about}: shorten it, or start the server with a larger --max-prompt-tokens",
            self.param,
        )

    def _require_text(self, text: str) -> None:
        """Raise APIError 400 if a text certainly has too many tokens."""
        if self._most is None or len(text) <= PIECE_CHARACTERS:
            return
        least = 0
        for piece in self._pieces(text):
            least += max(0, len(piece) - CUT_TOKENS)
            self.require(least, _AT_LEAST)

    def _pieces(self, text: str) -> Iterator[list[int]]:
        """Together as many tokens as a text has, give or take one for each piece."""
        for start in range(0, len(text), PIECE_CHARACTERS):
            yield self._tokenizer.encode(text[start : start + PIECE_CHARACTERS])


def _require_tools_shown(tokenizer: Any, body: ChatBody, options: ServerOptions) -> None:
    """Raise APIError unless a model's prompt names the tools of a request, or the answer may be
    made without them."""
    if not body.tools or body.tool_choice == "none":
        return
    has_own_form = tokenizer.has_tool_calling or tokenizer._chat_template is not None
    if has_own_form or "tools" in template_text(tokenizer):
        return
    if options.drop_tools:
        warn_once("tools of requests are dropped: the chat template of the model has none")
        return
    raise wrong_value(
        "tools: the chat template of this model has no tools, so the model would not see them: "
        "leave them out, take a model that was trained to call tools, or start the server with "
        "--drop-tools to answer without them",
        "tools",
    )


# Each part is published when it is computed, and the other server begins to read it.
PUBLISHED_TOKENS = 4 * PAGE_SIZE


def read_text(
    loaded: LoadedModel,
    prompt: str | Sequence[int],
    options: ServerOptions,
    *,
    is_published: bool = False,
) -> Prompt:
    """The prompt of a completion. One that `is_published`, as another server asks for it, is cut
    where that happens: all but its last token are full pages. Raises APIError 400: it has no
    tokens, too many, or some that the model does not know."""
    tokenizer = LimitedTokenizer(loaded, options, "prompt")
    tokens = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    checked = _checked(loaded, Prompt(tokens, [tokens]), tokenizer)
    if not is_published:
        return checked
    pages, last = tokens[:-1], tokens[-1:]
    starts = range(0, len(pages), PUBLISHED_TOKENS)
    parts = [pages[start : start + PUBLISHED_TOKENS] for start in starts]
    return replace(checked, segments=[*parts, last])


def read_chat(
    loaded: LoadedModel,
    body: ChatBody,
    options: ServerOptions,
    marks: Sequence[Mark] = (),
    *,
    salt: Hashable = None,
    is_counted: bool = False,
) -> Prompt:
    """The prompt of a conversation. `marks` say what is to stay cached of it, and one that
    `is_counted` may have any length. Its `salt` is the one of `KeptTokens`. Raises APIError 400:
    the model's chat template refuses it, its images cannot be read, or it is too long."""
    _require_tools_shown(loaded.tokenizer, body, options)
    _require_template_kwargs(loaded, body.template_variables)
    require_parts(
        body.messages, why_no_images=loaded.why_no_images, urls_allowed=options.allow_image_urls
    )
    chat = _Chat(loaded, body, options, salt, is_counted)
    try:
        prompt = chat.prompt()
    except APIError:
        raise
    except Exception as error:
        raise wrong_value(
            f"these messages do not fit the chat template of the model: {error}", "messages"
        ) from error
    held = tuple(HeldPrompt(chat.end_of(mark, prompt), mark.seconds) for mark in marks)
    return _checked(loaded, replace(prompt, held=held), chat.tokenizer())


@dataclass(frozen=True)
class _Chat:
    """A conversation, as a loaded model's template reads it."""

    loaded: LoadedModel
    body: ChatBody
    options: ServerOptions
    salt: Hashable
    is_counted: bool

    def tokenizer(self, **end: Any) -> LimitedTokenizer:
        """A tokenizer for it, or for its first messages."""
        about: Any = {"salt": self.salt, "is_counted": self.is_counted, **end}
        return LimitedTokenizer(self.loaded, self.options, "messages", **about)

    def prompt(self) -> Prompt:
        """All of it."""
        loaded, messages = self.loaded, self._fitted(self.body.messages)
        has_images = any(server._image_parts(messages))
        if has_images:
            require_no_marks(messages, loaded.media_marks.values())
            inline_image_urls(messages, self.options.max_body_bytes)
        if has_images and loaded.prompts is not None:
            return self._with_images(messages)
        continued = _continued(self.body)
        begins_turn = continued is None and self.body.add_generation_prompt is not False
        tokenizer = self.tokenizer(continued=continued, begins_turn=begins_turn)
        tokens, segments, _, state, vision = self._tokenized(messages, tokenizer)
        if vision is None:
            return Prompt(tokens, segments, state)
        # Evaluate here: the generation thread cannot. See `ThreadConflict`.
        mx.eval(vision.pixel_values)
        return Prompt(tokens, segments, state, EmbeddedImages(tokens, vision))

    def end_of(self, mark: Mark, prompt: Prompt) -> int:
        """How many tokens of its prompt a mark is about. With images, and where the template takes
        no shorter conversation, it is about all of them."""
        messages = self.body.messages
        if mark.messages >= len(messages) or prompt.media is not None:
            return len(prompt.tokens)
        try:
            tokens, *_ = self._tokenized(self._fitted(messages[: mark.messages]), self.tokenizer())
        except Exception:
            return len(prompt.tokens)
        return common_prefix(tokens, prompt.tokens)

    def _fitted(self, messages: Sequence[Any]) -> list[Any]:
        return self.loaded.roles.fitted(copied(messages), self.body.role_mapping or {})

    def _with_images(self, messages: list[Any]) -> Prompt:
        """The prompt for a model of mlx-vlm. Raises APIError 400: its answer is to continue the
        last message."""
        loaded, body = self.loaded, self.body
        if _continued(body) is not None or body.add_generation_prompt is False:
            raise wrong_value(
                "messages: with images the model continues no answers: end with a message of the "
                "user",
                "messages",
            )
        files = image_files(messages)
        server.process_message_content(messages, keep_images=True)
        variables = {**self.options.chat_template_args, **body.template_variables}
        media = loaded.prompts.chat(messages, files, tools=body.tools or None, **variables)
        tokens, end, tokenizer = media.tokens, media.media_end, loaded.tokenizer
        # Whether the model goes on with reasoning, as mlx-lm's server finds it out for texts.
        is_open = tokenizer.has_thinking and (
            tokenizer.rfind_think_start(tokens) > tokenizer.rfind_think_end(tokens)
        )
        state = tokenizer.response_initial_state or ("reasoning" if is_open else "normal")
        return Prompt(tokens, [tokens[:end], tokens[end:]], str(state), media)

    def _tokenized(self, messages: list[Any], tokenizer: Any) -> Any:
        body, processor = self.body, self.loaded.processor
        chat = server.CompletionRequest("chat", "", messages, body.tools or None, body.role_mapping)
        return tokenized(tokenizer, processor, chat, self.options, body.template_variables)


def _require_template_kwargs(loaded: LoadedModel, named: dict[str, Any]) -> None:
    """Raise APIError unless the names are variables of the template: as the tokenizer's own
    arguments they could do anything."""
    render = loaded.tokenizer._tokenizer.apply_chat_template
    parameters = inspect.signature(render).parameters.values()
    own = {each.name for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD}
    for name in named:
        if name in own - {"documents"} or not name.isidentifier():
            raise wrong_value(
                f"chat_template_kwargs.{name} is not a variable of templates: leave it out",
                f"chat_template_kwargs.{name}",
            )


def _checked(loaded: LoadedModel, prompt: Prompt, tokenizer: LimitedTokenizer) -> Prompt:
    tokens, param = prompt.tokens, tokenizer.param
    if not isinstance(tokens, list) or not tokens:
        raise wrong_value("the prompt has no tokens: give at least one", param)
    tokenizer.require(len(tokens))
    if prompt.media is None and (typed := loaded.media_marks.keys() & set(tokens)):
        raise typed_mark(loaded.media_marks[min(typed)], param)
    if not 0 <= min(tokens) <= max(tokens) < loaded.vocab_size:
        raise wrong_value(
            f"token ids from {min(tokens)} to {max(tokens)} were given, and the model knows those "
            f"from 0 to {loaded.vocab_size - 1}",
            param,
        )
    if loaded.prompts is not None and not loaded.is_batchable and prompt.media is None:
        prompt = replace(prompt, media=loaded.prompts.tokens(tokens))
    if loaded.has_states:
        segments = cut_at(prompt.segments, {each.num_tokens for each in prompt.held})
        segments = cut_for_snapshots(segments, at_pages=loaded.at_pages)
        prompt = replace(prompt, segments=segments)
    return prompt


def fit_context(
    arguments: GenerationArguments,
    prompt: Prompt,
    loaded: LoadedModel,
    options: ServerOptions,
    param: str,
) -> None:
    """Lower `max_tokens` to what the model's context holds behind a prompt. An option for longer
    prompts says that the model takes more than its config names: then nothing is known. Raises
    APIError 400: the prompt leaves no room for a token, and some are to be generated."""
    length, tokens = loaded.context_length, len(prompt.tokens)
    if length is None or (options.max_prompt_tokens or 0) > length or not arguments.max_tokens:
        return
    if tokens >= length:
        context = f"beside an answer, in the context length of {length} tokens: shorten it"
        raise _too_long(tokens, length - 1, context, param)
    arguments.max_tokens = min(arguments.max_tokens, length - tokens)


def _too_long(tokens: int, most: int, more: str, param: str) -> APIError:
    """400, in the words of Anthropic's API, by which coding agents notice that they must compact a
    conversation."""
    return APIError(
        400,
        f"prompt is too long: {tokens} tokens > {most} maximum {more}",
        param=param,
        code="context_length_exceeded",
    )
