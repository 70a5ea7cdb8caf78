"""Which parts of messages the server takes, and which library reads their images."""

from types import SimpleNamespace
from typing import Any

import pytest

from paged_kv.integrations.server.completions.message_parts import image_files, require_parts
from paged_kv.integrations.server.generation import image_support
from paged_kv.integrations.server.generation.image_support import refusal_of_mlx_vlm
from paged_kv.integrations.server.http.api_errors import APIError

HELLO = "data:text/plain;base64,aGVsbG8="
TEXT: dict[str, Any] = {"type": "text", "text": "a"}
NO_IMAGES = "this model takes no images"


def image(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def user(*parts: Any) -> list[Any]:
    return [{"role": "system", "content": "b"}, {"role": "user", "content": [*parts]}]


def check(*parts: Any, why_no_images: str | None = None, urls_allowed: bool = False) -> None:
    require_parts(user(*parts), why_no_images=why_no_images, urls_allowed=urls_allowed)


def test_texts_and_data_urls_are_taken() -> None:
    check(TEXT, image(HELLO), {"type": "input_image", "image_url": HELLO}, TEXT)
    check(TEXT, why_no_images=NO_IMAGES)
    check(image("https://localhost/a.png"), urls_allowed=True)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "input_audio", "input_audio": {}}, "type 'input_audio': send texts and images"),
        ({"type": "text"}, "no string as its text"),
        (image(5), "given as a data URL"),
        (image("file:///etc/hosts"), "given as a data URL"),
        (image("http://localhost/a.png"), "--allow-image-urls"),
    ],
)
def test_other_parts_are_refused(part: Any, message: str) -> None:
    with pytest.raises(APIError, match=message) as raised:
        check(TEXT, part)
    assert (raised.value.status, raised.value.param) == (400, "messages")


def test_a_text_model_says_why_it_takes_no_images() -> None:
    with pytest.raises(APIError, match=NO_IMAGES):
        check(TEXT, image(HELLO), why_no_images=NO_IMAGES)


def test_the_files_of_images_are_decoded() -> None:
    assert image_files(user(TEXT, image(HELLO), image("data:;base64,"))) == [b"hello", b""]


@pytest.mark.parametrize(
    ("url", "message"),
    [("data:image/png,abc", "must be base64"), ("data:;base64,aGVs!bG8=", "not base64")],
)
def test_what_is_not_base64_is_refused(url: str, message: str) -> None:
    with pytest.raises(APIError, match=message):
        image_files(user(image(url)))


@pytest.mark.parametrize(
    ("config", "options", "reason"),
    [
        ({"model_type": "llama"}, {}, "this model takes no images"),
        ({"model_type": "qwen2_vl", "vision_config": {}}, {}, None),
        ({"model_type": "muse_spark", "vision_config": {}}, {}, "this model takes no images"),
        ({"model_type": "llama", "vision_config": {}}, {}, "no model of the type 'llama'"),
        ({"model_type": "nothing"}, {}, "no model of the type 'nothing'"),
        ({"model_type": "gemma3", "vision_config": {}}, {"--draft-model": "d"}, "--draft-model"),
        ({"model_type": "gemma3", "vision_config": {}}, {"--kv-bits": 4}, "--kv-bits"),
        ({"model_type": "idefics3"}, {"--kv-bits": None}, None),
    ],
)
def test_mlx_vlm_loads_what_mlx_lm_would_load_without_its_images(
    config: dict[str, Any],
    options: dict[str, Any],
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {"qwen2_vl", "idefics3", "muse_spark", "gemma3"}
    loading = SimpleNamespace(knows=lambda config: config["model_type"] in known)
    monkeypatch.setattr(image_support, "find_spec", lambda _: object())
    monkeypatch.setattr(image_support, "loading_with_mlx_vlm", lambda: loading)
    refusal = refusal_of_mlx_vlm(config, options)
    assert refusal is None if reason is None else reason in (refusal or "")


def test_what_only_mlx_vlm_knows_takes_no_options_of_mlx_lm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(image_support, "find_spec", lambda _: object())
    loading = SimpleNamespace(knows=lambda _: True)
    monkeypatch.setattr(image_support, "loading_with_mlx_vlm", lambda: loading)
    with pytest.raises(ValueError, match="--draft-model does not work with models of mlx-vlm"):
        refusal_of_mlx_vlm({"model_type": "idefics3"}, {"--draft-model": "ngram"})


def test_without_the_extra_its_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_support, "find_spec", lambda _: None)
    refusal = refusal_of_mlx_vlm({"model_type": "gemma3", "vision_config": {}}, {})
    assert "paged-kv[vlm]" in (refusal or "")
    with pytest.raises(ValueError, match=r"no model of the type 'idefics3'.*paged-kv\[vlm\]"):
        refusal_of_mlx_vlm({"model_type": "idefics3"}, {})
    assert refusal_of_mlx_vlm({"model_type": "own", "model_file": "own.py"}, {})
