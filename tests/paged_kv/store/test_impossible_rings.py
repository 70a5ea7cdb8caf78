"""The store rejects a sound file whose description of a ring is impossible."""

import dataclasses
import json
from pathlib import Path

import pytest
from mlx_lm.models.cache import make_prompt_cache

from paged_kv.store.entry_file import SUFFIX, decode, encode
from tests.support.generation import assert_same_run, greedy
from tests.support.stored_prompts import TEXT, computed, shallow_model, stored_factory, warm

LENGTH = 600


def rewritten(folder: Path, written: int) -> int:
    """Let files of rings at the end of a prompt claim so many written tokens; returns the number of
    files."""
    changed = 0
    for path in folder.glob(f"*{SUFFIX}"):
        entry = decode(path.read_bytes(), path.name.removesuffix(SUFFIX))
        notes = json.loads(entry.notes)
        if entry.place.link.end == LENGTH:
            false = dataclasses.replace(entry, notes=json.dumps({**notes, "written": written}))
            path.write_bytes(b"".join(encode(false)))
            changed += 1
    return changed


@pytest.mark.parametrize("written", [LENGTH - 1, LENGTH + 600])
def test_a_ring_that_cannot_end_there_is_computed_again(tmp_path: Path, written: int) -> None:
    """It claims too few tokens to end there, or so many that its window is overwritten."""
    model, prompt = shallow_model("gemma3_text"), [*TEXT[:LENGTH], 3, 4]
    factory = stored_factory(model, tmp_path)
    computed(model, factory, TEXT[:LENGTH])
    factory.close()
    factory = stored_factory(model, tmp_path)
    assert factory.fetch_cache(prompt)[1] == LENGTH
    factory.close()
    assert rewritten(tmp_path, written) > 0
    factory = stored_factory(model, tmp_path)
    run, cached = warm(model, factory, prompt)
    factory.close()
    assert cached < LENGTH
    assert_same_run(run, greedy(model, prompt, make_prompt_cache(model), 4), 1e-3)
