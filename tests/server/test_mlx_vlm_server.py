"""`paged-kv server` with models of mlx-vlm. `.ci/check_versions` runs these: they need the extra
vlm."""

import base64
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from threading import Event, Thread
from typing import Any

import mlx.core as mx
import pytest

pytest.importorskip("mlx_vlm", reason="needs the extra vlm")

import mlx_vlm
from anthropic import BadRequestError as AnthropicBadRequest
from mlx_vlm.prompt_utils import apply_chat_template
from openai import BadRequestError, OpenAI
from PIL import Image

from paged_kv.integrations.mlx_vlm.image_generation import PromptSteps, TextModel
from paged_kv.server.completions import handler
from tests.server.messages.test_messages import anthropic_client
from tests.support.folders import MODEL_FOLDERS
from tests.support.running_server import (
    PATIENCE_S,
    PagedRunningServer,
    assert_idle_pools_hold_nothing,
    paged_server,
    wait_until,
)
from tests.support.vision_folder import IMAGE, write_model, write_model_and_pictures

NEW_TOKENS = 8
TEXT = "def read(path):"
# More than one step of 16 tokens.
LONG = "".join(f"def read_{name}(path): return open(path)\n" for name in range(12)).strip()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_and_pictures(tmp_path_factory.mktemp("vision"))


def large_picture(width: int, height: int) -> str:
    """A file of kilobytes that would take hundreds of megabytes of memory."""
    file = BytesIO()
    Image.new("1", (width, height)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


LARGE = large_picture(12_000, 12_000)
# Beside another picture it has too many pixels.
WIDE = large_picture(10_000, 10_000)


def options(folder: Path, *others: str) -> list[str]:
    small = ("--max-tokens", str(NEW_TOKENS), "--prefill-step-size", "16")
    return ["--model", str(folder / "model"), *small, *others]


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[PagedRunningServer]:
    with paged_server(*options(folder)) as server:
        yield server
        assert_idle_pools_hold_nothing(server)


@pytest.fixture
def client(running: PagedRunningServer) -> OpenAI:
    return running.client()


@pytest.fixture(scope="module")
def expected(folder: Path) -> Callable[..., str]:
    """What mlx-vlm's own `generate` says about messages and pictures."""
    model, processor = mlx_vlm.load(str(folder / "model"))

    def said(messages: list[Any], *pictures: str) -> str:
        prompt = apply_chat_template(processor, model.config, messages, num_images=len(pictures))
        result: Any = mlx_vlm.generate(
            model,
            processor,
            prompt,
            image=[str(folder / f"{name}.png") for name in pictures],
            max_tokens=NEW_TOKENS,
            temperature=0.0,
        )
        return str(result.text)

    return said


def picture(folder: Path, name: str) -> dict[str, Any]:
    content = base64.b64encode((folder / f"{name}.png").read_bytes()).decode()
    return image(f"data:image/png;base64,{content}")


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def user(*parts: dict[str, Any] | str) -> list[Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": content}]


def ask(client: OpenAI, messages: list[Any], **more: Any) -> tuple[str, int]:
    """The answer, and the number of cached prompt tokens."""
    answer = client.chat.completions.create(model="default_model", messages=messages, **more)
    details: Any = answer.usage and answer.usage.prompt_tokens_details
    return answer.choices[0].message.content or "", details.cached_tokens


def salted(salt: str) -> dict[str, Any]:
    return {"extra_body": {"cache_salt": salt}}


def test_answers_are_mlx_vlms(
    folder: Path, running: PagedRunningServer, client: OpenAI, expected: Callable[..., str]
) -> None:
    """Texts and pictures in turn: positions of one must not stay for the other."""
    red, blue = picture(folder, "red"), picture(folder, "blue")
    for messages, pictures in (
        (user(red, TEXT), ["red"]),
        (user(TEXT), []),
        (user(LONG, blue, TEXT), ["blue"]),
        (user(LONG), []),
        (user(red, TEXT, blue, LONG), ["red", "blue"]),
    ):
        assert ask(client, messages, **salted("in turn"))[0] == expected(messages, *pictures)
    assert running.pools[0].stats().gather_fallbacks == 0


def test_an_image_is_found_by_its_content(
    folder: Path, client: OpenAI, expected: Callable[..., str]
) -> None:
    red, blue = picture(folder, "red"), picture(folder, "blue")
    first, other = user(LONG, red, TEXT), user(LONG, red, "class Stack:")
    text, cached = ask(client, first, **salted("content"))
    assert (text, cached) == (expected(first, "red"), 0)
    # The same picture, and a question that differs after it.
    text, behind = ask(client, other, **salted("content"))
    assert text == expected(other, "red")
    before = ask(client, user(LONG, blue, TEXT), **salted("content"))
    # Another picture shares the text before it, and the mark that begins it.
    assert before == (expected(user(LONG, blue, TEXT), "blue"), before[1])
    assert 0 < before[1] < behind
    # Both pictures: behind the first one, the second is seen.
    both = user(LONG, red, TEXT, blue, TEXT)
    text, cached = ask(client, both, **salted("content"))
    assert text == expected(both, "red", "blue")
    assert cached > behind
    assert ask(client, first, **salted("another salt"))[1] == 0


def test_choices_are_sampled_like_those_of_texts(folder: Path, client: OpenAI) -> None:
    def asked(*parts: Any, **more: Any) -> list[str | None]:
        answer = client.chat.completions.create(
            model="default_model", messages=user(*parts), seed=7, temperature=1.0, **more
        )
        return [choice.message.content for choice in answer.choices]

    red = picture(folder, "red")
    first, second = asked(LONG, red, n=2)
    assert first != second
    assert asked(LONG, red, n=2) == [first, second]
    (stopped,) = asked(LONG, red, stop=[(first or "")[5:8]])
    assert stopped == (first or "")[:5]


def test_texts_are_batched(client: OpenAI, expected: Callable[..., str]) -> None:
    """Rows of unequal length, of which some continue behind a cached prefix."""
    texts = [user(LONG[: 40 * rows].strip()) for rows in (1, 4, 2, 9)]
    with ThreadPoolExecutor(len(texts)) as threads:
        answers = list(threads.map(lambda each: ask(client, each)[0], texts))
    assert answers == [expected(each) for each in texts]


def test_a_model_that_cannot_read_in_parts_reads_all_at_once(
    folder: Path, client: OpenAI, expected: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prompts, texts too, are computed alone, and again each time."""
    monkeypatch.setattr(TextModel, "reads_in_parts", lambda *_: False)
    about, text = user(LONG, picture(folder, "red"), TEXT), user(LONG)
    penalty: Any = {"extra_body": {"repetition_penalty": 0.01, "repetition_context_size": 1000}}
    with paged_server(*options(folder)) as server:
        alone = server.client()
        assert [ask(alone, about) for _ in range(2)] == [(expected(about, "red"), 0)] * 2
        assert ask(alone, text) == (expected(text), 0)
        # Processors see the prompt, as those of a batch do.
        assert ask(alone, text, **penalty)[0] == ask(client, text, **penalty)[0] != expected(text)
        assert_idle_pools_hold_nothing(server)


def test_a_client_that_leaves_while_its_image_is_read_leaves_no_pages(
    folder: Path, running: PagedRunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, goes_on, step = Event(), Event(), PromptSteps.__call__

    def slow(steps: PromptSteps, inputs: mx.array, cache: list[Any]) -> mx.array:
        if cache[0].offset:  # The client hears that it began after the first step.
            reads.set()
            assert goes_on.wait(PATIENCE_S)
        return step(steps, inputs, cache)

    running.wait_until_idle()
    before = running.pools[0].stats()
    monkeypatch.setattr(handler, "KEEPALIVE_S", 0.1)
    monkeypatch.setattr(PromptSteps, "__call__", slow)
    messages = user(picture(folder, "red"), LONG[::-1])
    stream = running.client().chat.completions.create(
        model="default_model", messages=messages, stream=True, **salted("left")
    )
    assert reads.wait(PATIENCE_S)
    stream.close()
    wait_until(lambda: not running.service.gate.inside)
    goes_on.set()
    running.wait_until_idle()
    after = running.pools[0].stats()
    assert after.blocks_used == 0
    assert after.blocks_cached <= before.blocks_cached + 1


def test_images_are_found_on_disk_by_the_same_model_only(
    folder: Path, tmp_path: Path, expected: Callable[..., str]
) -> None:
    """Another part that sees images makes other pages, also where the language model is equal."""
    messages = user(LONG * 2, picture(folder, "red"), TEXT)
    other = tmp_path / "model"
    write_model(other, vision_seed=1)
    stored = ("--store", str(tmp_path / "store"), "--store-after", "1")
    for model, cached in ((folder / "model", False), (folder / "model", True), (other, False)):
        with paged_server(*options(model.parent, *stored)) as server:
            text, found = ask(server.client(), messages)
        assert bool(found) == cached
        assert (text == expected(messages, "red")) == (model is not other)


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (image("data:image/png;base64,!"), "not base64"),
        (image("data:image/png,abc"), "must be base64"),
        (image("data:image/png;base64,aGVsbG8="), "5 bytes cannot be read"),
        (image("http://127.0.0.1:9/a.png"), "--allow-image-urls"),
        (image("file:///etc/hosts"), "as a data URL"),
        ({"type": "input_audio", "input_audio": {"data": ""}}, "type 'input_audio'"),
        (image(f"data:image/png;base64,{LARGE}"), "12,000 x 12,000 pixels"),
        (image(f"data:image/png;base64,{WIDE}"), "10,000 x 10,000 pixels, .* of all images"),
        (IMAGE, "a text holds '.*', which stands for images"),
    ],
)
@pytest.mark.filterwarnings("ignore:Image size")
def test_what_is_no_image_is_refused(
    folder: Path, client: OpenAI, part: dict[str, Any] | str, reason: str
) -> None:
    """The server lives on, also when a text has marks of images that are not there."""
    with pytest.raises(BadRequestError, match=reason):
        ask(client, user(picture(folder, "red"), part))
    assert ask(client, user(TEXT))[0]


def test_marks_of_images_that_a_user_typed_are_refused(
    client: OpenAI, running: PagedRunningServer
) -> None:
    """Without images too, in any part of a request."""
    tokenizer: Any = running.provider.tokenizer
    for typed in (IMAGE, "<|image_pad|>", "<|video_pad|>", "a <|vision_start|> b"):
        with pytest.raises(BadRequestError, match=r"a text holds '<.*', which stands for images"):
            ask(client, user(typed))
        for prompt in (typed, tokenizer.encode(typed)):
            with pytest.raises(BadRequestError, match="which stands for images") as refused:
                client.completions.create(model="default_model", prompt=prompt)
            assert refused.value.param == "prompt"
    with pytest.raises(BadRequestError, match=r"a text holds '<.image_pad.>'"):
        ask(client, user("<|image_", "pad|>"))
    assert ask(client, user("image_pad, vision_start and <video>"))[0]


def test_addresses_are_fetched_where_that_is_allowed(
    folder: Path, expected: Callable[..., str]
) -> None:
    files = ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(folder))
    )
    Thread(target=files.serve_forever).start()
    try:
        messages = user(image(f"http://127.0.0.1:{files.server_port}/red.png"), TEXT)
        with paged_server(*options(folder, "--allow-image-urls")) as server:
            assert ask(server.client(), messages)[0] == expected(messages, "red")
    finally:
        files.shutdown()
        files.server_close()


def test_models_of_both_libraries_replace_each_other(
    folder: Path, expected: Callable[..., str]
) -> None:
    """Each takes what its own model takes."""
    seeing, blind = str(folder / "model"), str(MODEL_FOLDERS["stdlib-llama"])
    messages = user(picture(folder, "red"), TEXT)
    with paged_server("--max-tokens", str(NEW_TOKENS), "--allow-model-switch") as server:
        for _ in range(2):
            answer = server.client().chat.completions.create(model=seeing, messages=messages)
            assert answer.choices[0].message.content == expected(messages, "red")
            with pytest.raises(BadRequestError, match="this model takes no images"):
                server.client().chat.completions.create(model=blind, messages=messages)
        assert_idle_pools_hold_nothing(server)


def test_images_of_responses_and_messages_are_those_of_chats(
    folder: Path, running: PagedRunningServer, client: OpenAI, expected: Callable[..., str]
) -> None:
    """And they are found by their content."""
    about = expected(user(LONG, picture(folder, "red"), TEXT), "red")
    url = picture(folder, "red")["image_url"]["url"]
    asked: Any = [
        {"type": "input_text", "text": LONG},
        {"type": "input_image", "image_url": url, "detail": "auto"},
        {"type": "input_text", "text": TEXT},
    ]
    shown: Any = [
        {"type": "text", "text": LONG},
        {"type": "image", "source": source_of(folder, "red")},
        {"type": "text", "text": TEXT, "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ]
    with anthropic_client(running) as claude:
        for turn in range(2):
            response = client.responses.create(
                model="default_model", input=[{"role": "user", "content": asked}], **salted("new")
            )
            assert response.output_text == about
            assert response.usage
            found = response.usage.input_tokens_details.cached_tokens
            assert bool(found) == bool(turn)
            message: Any = claude.messages.create(
                model="default_model",
                max_tokens=NEW_TOKENS,
                messages=[{"role": "user", "content": shown}],
                extra_body={"cache_salt": "new"},
            )
            assert message.content[0].text == about
            # Whichever interface came first, the other finds its pages.
            assert message.usage.cache_read_input_tokens > 0
        count = claude.messages.count_tokens(
            model="default_model", messages=[{"role": "user", "content": shown}]
        )
        usage = message.usage
        assert count.input_tokens == (
            usage.cache_read_input_tokens + usage.cache_creation_input_tokens
        )
        assert usage.cache_creation.ephemeral_5m_input_tokens == 0
        wrong: Any = [{**shown[1], "source": {**shown[1]["source"], "data": "aGVsbG8="}}]
        with pytest.raises(AnthropicBadRequest, match="cannot be read"):
            claude.messages.create(
                model="default_model",
                max_tokens=1,
                messages=[{"role": "user", "content": wrong}],
            )
    there: Any = [{"type": "input_image", "image_url": "http://127.0.0.1:9/a.png"}]
    with pytest.raises(BadRequestError, match="--allow-image-urls"):
        client.responses.create(model="default_model", input=[{"role": "user", "content": there}])


def source_of(folder: Path, name: str) -> dict[str, Any]:
    content = base64.b64encode((folder / f"{name}.png").read_bytes()).decode()
    return {"type": "base64", "media_type": "image/png", "data": content}


def test_a_tool_shows_an_image(folder: Path, running: PagedRunningServer, client: OpenAI) -> None:
    """As a part of its result, in both interfaces: for the template the user shows it."""
    url = picture(folder, "red")["image_url"]["url"]
    call: Any = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}
    parts: Any = [{"type": "input_text", "text": TEXT}, {"type": "input_image", "image_url": url}]
    result: Any = {"type": "function_call_output", "call_id": "1", "output": parts}
    response = client.responses.create(
        model="default_model", input=[{"role": "user", "content": LONG}, call, result]
    )
    seen = {"type": "image", "source": source_of(folder, "red")}
    content = [{"type": "text", "text": TEXT}, seen]
    use = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    shown: Any = [
        {"role": "user", "content": LONG},
        {"role": "assistant", "content": [use]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "1", "content": content}],
        },
    ]
    with anthropic_client(running) as claude:
        message: Any = claude.messages.create(
            model="default_model", max_tokens=NEW_TOKENS, messages=shown
        )
    assert message.content[0].text == response.output_text
    assert message.usage.cache_read_input_tokens > 20
