"""Prompts with images are cached under keys that tell the images apart."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from paged_kv.integrations.media_keys import MediaKeys

IMAGE, AUDIO = 97, 98
PROMPT = [1, 2, IMAGE, IMAGE, IMAGE, 3, IMAGE, IMAGE, 4]
RED, BLUE = np.zeros((2, 2, 3), np.uint8), np.ones((2, 2, 3), np.uint8)


def keys_of(**config: Any) -> MediaKeys:
    return MediaKeys(SimpleNamespace(config=SimpleNamespace(**config)))


KEYS = keys_of(image_token_index=IMAGE, audio_token_id=AUDIO)


def test_text_alone_stays_as_it_is() -> None:
    assert KEYS.keyed([1, 2, 3], {}) == [1, 2, 3]
    assert MediaKeys(object()).keyed(PROMPT, {}) == PROMPT


def test_equal_images_get_equal_ids_and_others_do_not() -> None:
    both, again = (KEYS.keyed(PROMPT, {"images": [RED, BLUE]}) for _ in range(2))
    other = KEYS.keyed(PROMPT, {"images": [RED, RED]})
    assert both == again
    assert [at for at, each in enumerate(both) if each < 0] == [2, 3, 4, 6, 7]
    assert len(set(both)) == len(PROMPT)
    assert both[:6] == other[:6]
    assert both[6:8] != other[6:8]
    assert other[2:4] == other[6:8]


def test_where_images_and_places_do_not_pair_up_every_place_stands_for_all() -> None:
    one, two = (KEYS.keyed(PROMPT, {"images": [image]}) for image in (RED, BLUE))
    assert not set(one[2:5] + one[6:8]) & set(two)
    assert one[:2] == two[:2]


def test_what_is_equal_depends_on_content_shape_type_and_settings(tmp_path: Path) -> None:
    prompt = [1, IMAGE]
    (tmp_path / "image").write_bytes(b"\0\1")
    seen = [
        KEYS.keyed(prompt, {"images": [each]})[1]
        for each in (RED, RED.reshape(4, 3), RED.astype(np.int8), mx.array(RED) + 1, b"\0\1")
    ]
    assert len(set(seen)) == len(seen)
    assert KEYS.keyed(prompt, {"images": [mx.array(RED)]})[1] == seen[0]
    assert KEYS.keyed(prompt, {"images": [tmp_path / "image"]})[1] == seen[4]
    model = SimpleNamespace(config=SimpleNamespace(image_token_id=IMAGE))
    with_settings = [
        MediaKeys(model, SimpleNamespace(image_processor=SimpleNamespace(size=size)))
        for size in (224, 336, 224)
    ]
    small, large, again = (each.keyed(prompt, {"images": [RED]}) for each in with_settings)
    assert small == again != large
    image, sound = KEYS.keyed([IMAGE], {"images": [RED]}), KEYS.keyed([AUDIO], {"audio": [RED]})
    assert image != sound


@pytest.mark.parametrize(
    ("tokens", "media", "error"),
    [
        (PROMPT, {}, ValueError),
        ([1, 2], {"images": [RED]}, ValueError),
        ([1, AUDIO], {}, ValueError),
        ([1], {"videos": [RED]}, ValueError),
        (PROMPT, {"images": [7]}, TypeError),
        (PROMPT, {"pictures": [RED]}, TypeError),
    ],
)
def test_media_that_are_not_of_the_prompt_or_of_a_wrong_type_are_refused(
    tokens: list[int], media: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        KEYS.keyed(tokens, media)
