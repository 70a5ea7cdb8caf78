"""The grammars of a loaded model: who asks for one waits for no other, on any rank."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from paged_kv.integrations.grammar.constraints import Constraint
from paged_kv.integrations.grammar.grammars import GrammarError, regex
from paged_kv.server.engine import sampling
from paged_kv.server.engine.generation_thread import GenerationThread
from paged_kv.server.engine.sampling import ModelGrammars
from paged_kv.server.http.api_errors import APIError
from tests.support.patience import PATIENCE_S

QUICK, SLOW, WRONG = [Constraint(regex(text), "field") for text in ("a", "slow", "wrong")]


class Compiling:
    """A vocabulary that compiles one grammar when it may, and another never."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.asked: list[str] = []
        self.tokens = object()

    def compiled(self, grammar: Any) -> Any:
        self.asked.append(grammar.text)
        if grammar.text == "slow":
            self.begun.set()
            assert self.may_end.wait(PATIENCE_S)
        if grammar.text == "wrong":
            raise GrammarError("it is wrong")
        return SimpleNamespace(text=grammar.text, tokens=self.tokens)


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Compiling:
    vocabulary = Compiling()
    monkeypatch.setattr(sampling, "Vocabulary", lambda *_: vocabulary)
    return vocabulary


def test_a_grammar_that_is_wrong_is_tried_again(compiling: Compiling) -> None:
    grammars = ModelGrammars(None, 10)
    for _ in range(2):
        with pytest.raises(APIError, match="field: it is wrong"):
            grammars.compiled(WRONG)
    assert compiling.asked == ["wrong", "wrong"]


@pytest.mark.parametrize("rank", [0, 1])
def test_other_ranks_compile_before_the_request_begins(rank: int, compiling: Compiling) -> None:
    grammars = ModelGrammars(None, 10)
    provider = SimpleNamespace(loaded=SimpleNamespace(grammars=grammars))
    thread: Any = SimpleNamespace(_ranks=SimpleNamespace(rank=rank), provider=provider)
    compiling.may_end.set()
    GenerationThread._compile(thread, SLOW)
    assert compiling.begun.wait(PATIENCE_S if rank else 0.1) is (rank > 0)
