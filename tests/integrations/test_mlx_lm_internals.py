"""What is private in mlx-lm is named in one file, which says what is missing."""

import ast
import re

import pytest
from mlx_lm.generate import BatchGenerator

from paged_kv.extras import MLXLMChanged
from paged_kv.integrations.mlx_lm_internals import _Attribute, _private
from tests.support.folders import ROOT

OWN = ROOT / "integrations" / "mlx_lm_internals.py"


def test_no_other_file_names_what_is_private() -> None:
    private = set(re.findall(r'"(?:[\w.:]+:)?(_\w+)"', OWN.read_text("utf-8")))
    private -= {"_step", "_next", "_current_tokens"}  # other classes have such names too
    assert {"_prompt_batch", "_next_tokens", "_tokenize", "_download"} <= private
    for path in [*ROOT.glob("integrations/**/*.py"), *ROOT.glob("server/**/*.py")]:
        nodes = [*ast.walk(ast.parse(path.read_text("utf-8")))] if path != OWN else []
        names = {each.attr for each in nodes if isinstance(each, ast.Attribute)}
        names |= {each.name for each in nodes if isinstance(each, ast.alias)}
        assert not names & private, path


def test_what_mlx_lm_has_no_more_is_named() -> None:
    with pytest.raises(MLXLMChanged, match=r"BatchGenerator._gone"):
        _Attribute(BatchGenerator, "_gone")
    with pytest.raises(MLXLMChanged, match=r"_step\(self, fast\)"):
        _private("mlx_lm.generate:GenerationBatch:_step", "self", "fast")
