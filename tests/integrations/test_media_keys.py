"""Prompts with images are cached under keys that tell the images apart."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paged_kv.integrations.media_keys import MediaKeys

IMAGE, AUDIO = 97, 98
PROMPT = [1, 2, IMAGE, IMAGE, IMAGE, 3, IMAGE, IMAGE, 4]
RED, BLUE = np.zeros((2, 2, 3), np.uint8), np.ones((2, 2, 3), np.uint8)


CONFIG = SimpleNamespace(image_token_index=IMAGE, audio_token_id=AUDIO)
KEYS = MediaKeys(SimpleNamespace(config=CONFIG))


def test_where_images_and_places_do_not_pair_up_every_place_stands_for_all() -> None:
    one, two = (KEYS.keyed(PROMPT, {"images": [image]}) for image in (RED, BLUE))
    assert not set(one[2:5] + one[6:8]) & set(two)
    assert one[:2] == two[:2]


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
