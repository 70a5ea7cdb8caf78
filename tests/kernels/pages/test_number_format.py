"""Quantised numbers against llama.cpp's q8_0, q4_0 and q5_0 with other groups, in numpy alone."""

from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from paged_kv.kernels.pages.number_format import (
    KEY_FORMATS,
    VALUE_FORMATS,
    NumberFormat,
    centre,
    rotate,
)
from paged_kv.kernels.pages.page_format import LayerGeometry, PageLayout, page_format_named

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

QUANTISED = ["q8", "q4"]
DTYPES = [mx.float16, mx.bfloat16, mx.float32]
# float32 sums in another order may round a scale to the next float16.
ONE_ULP = 2.0**-10


def numbers(shape: tuple[int, ...], seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def turned(rows: Floats) -> Floats:
    """Numbers in the basis of the codes, or back. Small whole numbers of 64 come back as they
    were."""
    return np.asarray(rotate(mx.array(rows)))


def encoded(name: str, rows: Floats) -> tuple[Bytes, Floats]:
    return by_group(*VALUE_FORMATS[name].encode(mx.array(rows)))


def by_group(codes: mx.array, scales: mx.array) -> tuple[Bytes, Floats]:
    """Bytes [..., groups, bytes of a group] and scales [..., groups] of these planes."""
    assert (codes.dtype, scales.dtype) == (mx.uint16, mx.uint16)
    as_bytes = np.asarray(codes).view(np.uint8)
    found = np.asarray(scales).view(np.float16).astype(np.float32)
    return as_bytes.reshape(*found.shape, -1), found


def round_trip(number_format: NumberFormat, rows: mx.array) -> Floats:
    found = number_format.decode(number_format.encode(rows), rows.dtype)
    assert (found.dtype, found.shape) == (rows.dtype, rows.shape)
    return np.asarray(found.astype(mx.float32))


def reference_codes(rows: Floats, n: int, group: int) -> tuple[Bytes, Floats]:
    """Codes of quantize_row_q4_0 or q5_0, by 32, and the best scales for them."""
    groups = rows.reshape(*rows.shape[:-1], -1, group)
    at = np.abs(groups).argmax(-1)[..., None]
    scale = np.take_along_axis(groups, at, -1) / np.float32(-n)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    codes = np.minimum((groups * inverse + np.float32(n + 0.5)).astype(np.int8), 2 * n - 1)
    signed = codes.astype(np.float64) - n
    squares = (signed**2).sum(-1)
    products = (signed * groups).sum(-1)
    best = np.divide(products, squares, out=np.zeros_like(products), where=squares != 0)
    by_32 = codes.astype(np.uint8).reshape(*rows.shape[:-1], -1, 32)
    return by_32, best.astype(np.float16).astype(np.float32)


def reference_q4(rows: Floats) -> tuple[Bytes, Floats]:
    codes, scales = reference_codes(rows, 8, 64 if rows.shape[-1] % 64 == 0 else 32)
    packed = codes[..., :16] | (codes[..., 16:] << 4)
    return packed.astype(np.uint8).reshape(*scales.shape, -1), scales


def reference_q8(rows: Floats) -> tuple[Bytes, Floats]:
    """quantize_row_q8_0."""
    groups = rows.reshape(*rows.shape[:-1], -1, 32)
    scale = np.abs(groups).max(-1) / np.float32(127)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    codes = np.rint(groups * inverse[..., None]).astype(np.int8)
    return codes.view(np.uint8), scale.astype(np.float16).astype(np.float32)


REFERENCES: dict[str, Any] = {"q4": reference_q4, "q8": reference_q8}


def assert_codes_are(name: str, codes: Bytes, scales: Floats, of: Floats) -> None:
    """They are llama.cpp's of these numbers, which are in the basis of the codes."""
    expected_codes, expected_scales = REFERENCES[name](of)
    # Codes of a group of zeros mean nothing.
    means = expected_scales != 0
    assert (codes[means] == expected_codes[means]).all()
    assert (scales[~means] == 0).all()
    np.testing.assert_allclose(scales, expected_scales, rtol=ONE_ULP)


def special_rows() -> Floats:
    """Zeros; one number alone, of either sign; the largest negative and positive; all alike."""
    rows = np.zeros((7, 64), np.float32)
    rows[1, 5], rows[2, 40] = 3.0, -3.0
    rows[3] = numbers((64,))
    rows[3, 9] = -10.0
    rows[4], rows[5], rows[6] = -rows[3], 0.7, -0.7
    return rows


@pytest.mark.parametrize("name", REFERENCES)
def test_bytes_and_scales_are_those_of_llama_cpp(name: str) -> None:
    few = numbers((9, 64))
    for rows in (numbers((500, 96)), few * 1e4, few * 1e-3, special_rows()):
        given = turned(rows)
        assert_codes_are(name, *encoded(name, given), of=turned(given))


@pytest.mark.parametrize("name", QUANTISED)
def test_each_token_is_encoded_alone(name: str) -> None:
    rows = numbers((2, 3, 5, 64))
    codes, scales = encoded(name, rows)
    rows[1, 2, 3] *= 1000
    others, other_scales = encoded(name, rows)
    changed = (codes != others).any((-1, -2)) | (scales != other_scales).any(-1)
    assert np.argwhere(changed).tolist() == [[1, 2, 3]]
    one, one_scales = encoded(name, rows[1, 2, 3])
    assert (one == others[1, 2, 3]).all()
    assert (one_scales == other_scales[1, 2, 3]).all()


@pytest.mark.parametrize("name", QUANTISED)
def test_what_is_finite_stays_finite(name: str) -> None:
    """A NaN in a value makes every query's output NaN."""
    sizes = [(mx.float16, 5e4), (mx.float16, 1e-7)]
    sizes += product(DTYPES[1:], (1e30, 1e-30, 1e-38, 1e-39, 1e-41))
    for dtype, size in sizes:
        rows = np.random.default_rng(0).uniform(-size, size, (100, 64)).astype(np.float32)
        rows[0], rows[1], rows[2, 1:] = size, -size, 0
        found = round_trip(VALUE_FORMATS[name], mx.array(rows).astype(dtype))
        assert np.isfinite(found).all(), (dtype, size)


def test_bits_of_a_number_in_a_page() -> None:
    geometry = LayerGeometry(3, 64, mx.bfloat16, 3, 64, mx.bfloat16)

    def bits(name: Any) -> float:
        layout = PageLayout(page_format_named(name), geometry)
        return layout.page_bytes * 8 / (2 * 3 * 256 * 64)

    assert bits("q4") == (5.25 + 0.0625 + 4.25) / 2
    assert bits("q8") == 8.5
    assert bits(("q8", "q4")) == (8.5 + 4.25) / 2
    assert bits(("fp16", "q4")) == (16 + 4.25) / 2


def signal_to_noise(name: str, rows: Floats) -> float:
    noise = round_trip(VALUE_FORMATS[name], mx.array(rows)) - rows
    return float(10 * np.log10((rows**2).sum() / (noise**2).sum()))


def test_rotation_spreads_channels_that_are_far_larger() -> None:
    rows = numbers((2000, 128))
    assert signal_to_noise("q4", rows) >= 20.4
    assert signal_to_noise("q8", rows) >= 45
    rows[:, [7, 45, 70, 101]] *= 16
    assert signal_to_noise("q4", rows) > 22
    # Rotated, these have the large channels again, and so have their codes.
    assert signal_to_noise("q4", turned(rows)) < 15


def with_offset(tokens: int = 256) -> Floats:
    """Keys of which most is what they have in common."""
    return numbers((3, tokens, 128)) + 6 * numbers((3, 1, 128), seed=1)


def test_codes_are_those_of_the_differences_from_the_mean() -> None:
    keys = with_offset()
    lower, fifths_and_scales, row = map(np.asarray, KEY_FORMATS["q4"].encode(mx.array(keys)))
    mean = row.view(np.float16).astype(np.float32)
    basis = turned(keys)
    np.testing.assert_allclose(mean, basis.mean(1, keepdims=True), rtol=1e-3, atol=1e-3)
    expected, scales = reference_codes(basis - mean, 16, 128)
    halves = np.ascontiguousarray(lower).view(np.uint8).reshape(3, 256, 4, 16)
    fifths = np.ascontiguousarray(fifths_and_scales[..., :8]).view("<u4")
    places = [8 * (j % 4) + j // 4 for j in range(32)]
    codes = np.concatenate([halves & 15, halves >> 4], -1) + (fifths[..., None] >> places & 1) * 16
    assert (codes == expected).all()
    found = np.ascontiguousarray(fifths_and_scales[..., 8:]).view(np.float16).astype(np.float32)
    np.testing.assert_allclose(found, scales, rtol=ONE_ULP)


def test_the_centre_is_a_sum_of_four_parts_in_order() -> None:
    """Other backends add in this order, and codes turn on the last bits."""
    keys = with_offset()
    parts = [np.zeros((3, 128), np.float32)] * 4
    for token in range(256):
        parts[token % 4] = parts[token % 4] + keys[:, token]
    total = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    assert (np.asarray(centre(mx.array(keys)))[:, 0] == total / np.float32(256)).all()


@pytest.mark.parametrize("what", [np.nan, np.inf, -np.inf, 3e38])
def test_a_token_that_is_not_finite_spoils_no_other(what: float) -> None:
    keys = numbers((2, 256, 64))
    keys[0, 17, 5] = what
    found = round_trip(KEY_FORMATS["q4"], mx.array(keys))
    others = np.delete(found[0], 17, axis=0) - np.delete(keys[0], 17, axis=0)
    assert np.abs(others).max() < 1.2
    assert np.abs(found[1] - keys[1]).max() < 1.2


def test_pages_are_decoded_together_and_tokens_with_the_rows_of_their_pages() -> None:
    pages = [with_offset(), with_offset() - 20]
    held = KEY_FORMATS["q4"]
    each = [held.encode(mx.array(page)) for page in pages]
    expected = np.concatenate([round_trip(held, mx.array(page)) for page in pages], axis=1)
    together = [mx.concatenate(list(planes), axis=1) for planes in zip(*each, strict=True)]
    assert (np.asarray(held.decode(together, mx.float32)) == expected).all()
    codes, scales, rows = together
    at = mx.array([300, 2, 511])
    some = [codes[:, at], scales[:, at], rows[:, at // 256]]
    assert (np.asarray(held.decode(some, mx.float32)) == expected[:, [300, 2, 511]]).all()


def test_rotation_is_its_own_inverse_and_keeps_products() -> None:
    for dim in (32, 64, 96, 128, 160, 192, 256, 512, 576):
        rows = mx.array(numbers((20, dim)))
        turned = rotate(rows)
        assert float(mx.abs(turned - rows).max()) > 0.1
        np.testing.assert_allclose(np.asarray(rotate(turned)), np.asarray(rows), atol=1e-5)
        products = np.asarray(rows, np.float64) @ np.asarray(rows, np.float64).T
        found = np.asarray(turned, np.float64) @ np.asarray(turned, np.float64).T
        np.testing.assert_allclose(found, products, atol=1e-4)


@pytest.mark.parametrize("name", QUANTISED)
def test_any_whole_number_of_groups_is_held(name: str) -> None:
    """Also no heads: an indexer's cache keeps keys alone."""
    for number_format in (VALUE_FORMATS[name], KEY_FORMATS[name]):
        for dim in (0, 32, 96, 576):
            rows = mx.array(numbers((2, 3, dim)))
            words = number_format.slot_words(dim, mx.float32)
            assert [plane.shape[-1] for plane in number_format.encode(rows)][:2] == list(words)
            assert round_trip(number_format, rows).shape == rows.shape
        for dim in (16, 48, 80):
            with pytest.raises(ValueError, match=f"got {dim}: use 'fp16'"):
                number_format.slot_words(dim, mx.float16)
