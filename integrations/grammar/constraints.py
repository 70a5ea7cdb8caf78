"""Where in a model's answer a grammar holds: all of it but the thinking, or only some parts."""

from __future__ import annotations

from typing import Any, NamedTuple

from paged_kv.integrations.grammar.grammars import Grammar


class Constraint(NamedTuple):
    """A grammar of an answer.

    Attributes:
        grammar: of the answer, or of what follows `after`.
        field: the field of a request that asked for it.
        after: the text after which the grammar begins, each time that it comes; None for an answer
            that the grammar describes as a whole, behind the model's thinking.
        repeats: whether other text may follow what the grammar describes.
        is_optional: whether any text will do if the grammar does not compile.
        has_marks: whether the grammar describes the marks too that a model writes into answers.
    """

    grammar: Grammar
    field: str
    after: str | None = None
    repeats: bool = False
    is_optional: bool = False
    has_marks: bool = False

    def for_model(self, tokenizer: Any) -> Constraint:
        """What this means for a model: the same for all."""
        return self

    def place(self, tokenizer: Any, initial_state: str) -> dict[str, Any]:
        """The arguments of `CompiledGrammar.begin` for an answer.

        Args:
            tokenizer: mlx-lm's.
            initial_state: "reasoning" if the prompt's end lets the model think; else "normal".

        Raises:
            ValueError: the model's answers have a form of their own.
        """
        if self.after is not None:
            return {"after": self.after, "repeats": self.repeats}
        if writes_marks(tokenizer) and not self.has_marks:
            raise ValueError("this model writes marks into its answers that no grammar describes")
        if initial_state == "reasoning":
            return {"after": tokenizer.think_end, "is_required": True}
        openings: Any = tokenizer.think_start_tokens or ()
        if len(openings) != 1:
            return {}
        return {"after": tokenizer.think_end, "opening": openings[0], "is_required": True}


def writes_marks(tokenizer: Any) -> bool:
    """Whether a model's answers have marks besides those of thinking and of calls."""
    return bool(tokenizer.structural_markers or tokenizer.response_transitions)
