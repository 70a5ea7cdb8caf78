"""Options are fields of frozen dataclasses, of which command lines are made."""

import argparse
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from paged_kv.integrations.cache_options import CacheKeywords, CacheOptions
from paged_kv.integrations.generation.options import GenerateOptions
from paged_kv.options import (
    Options,
    _meanings,
    add_options,
    option,
    parsed_options,
    part,
    require_writable,
)
from paged_kv.server.options import ServerOptions


@dataclass(frozen=True)
class Inner(Options):
    """Others.

    Attributes:
        after: how many.
    """

    after: int = option(1, parse=int, needs="there", usual="one")


@dataclass(frozen=True)
class Outer(Options):
    """Some options.

    Attributes:
        place: where, 100% sure, and
            nowhere else.
        is_open: whether it is open.
        hidden: no flag.
        inner: others.
    """

    place: str | None = option(None, flag="there", nargs="?", const=lambda: "near")
    is_open: bool = option(False)
    hidden: int = option(0, parse=None, check=abs)
    inner: Inner = part(Inner(), prefix="place_", group="inner")


DEFAULTS = Outer(place="here", inner=Inner(2))


def parsed(*words: str) -> Outer:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_options(parser, DEFAULTS)
    return parsed_options(parser.parse_args(words), DEFAULTS)


def test_what_is_given_replaces_the_defaults_and_the_rest_stays() -> None:
    assert parsed() == DEFAULTS
    assert parsed("--there").place == "near"
    given = parsed("--there", "x", "--is-open", "--place-after", "3")
    assert given == Outer("x", True, 0, Inner(3))


def test_an_option_without_the_one_that_it_needs_is_refused() -> None:
    with pytest.raises(ValueError, match="--place-after is an option of --there"):
        parsed("--place-after", "3")


def test_help_names_the_defaults_at_hand() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, DEFAULTS)
    shown = " ".join(parser.format_help().split())
    assert "[THERE] where, 100% sure, and nowhere else (default: here)" in shown
    assert "how many (default: 2)" in shown
    assert "hidden" not in shown


def test_values_are_kept_as_their_check_returns_them() -> None:
    assert Outer(hidden=-3).hidden == 3
    with pytest.raises(argparse.ArgumentError, match="invalid literal"):
        parsed("--there", "x", "--place-after", "many")


@pytest.mark.parametrize("kind", [CacheOptions, GenerateOptions, ServerOptions])
def test_docstrings_say_what_each_option_means(kind: type[Options]) -> None:
    assert {each.name for each in fields(kind)} <= _meanings(kind).keys()


def test_a_factory_takes_every_option_as_a_keyword_too() -> None:
    keywords = {name: each.__forward_arg__ for name, each in CacheKeywords.__annotations__.items()}
    assert keywords == {each.name: each.type for each in fields(CacheOptions)}


def test_a_file_stays_as_it_is(tmp_path: Path) -> None:
    require_writable(tmp_path / "new")
    assert not list(tmp_path.iterdir())
    (tmp_path / "old").write_text("mine")
    require_writable(tmp_path / "old")
    assert (tmp_path / "old").read_text() == "mine"
