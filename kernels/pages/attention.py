"""Defines how a layer attends: what stays the same in all of its steps."""

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, eq=False)
class Attention:
    """The arguments of a layer's attention.

    Attributes:
        scale: of scores.
        causal: whether later tokens are hidden.
        window: hides later tokens too, and tokens `window` or more positions back; None for none.
        sinks: [q_heads], logits of one more key without a value; None for none.
        softcap: scores become softcap * tanh(score / softcap), sinks stay; None for no cap.
        read_tokens: the most tokens that a query reads in steps of one token per sequence, see
            `paged_kv.kernels.pages.choice`; None for all.
    """

    scale: float
    causal: bool = True
    window: int | None = None
    sinks: mx.array | None = None
    softcap: float | None = None
    read_tokens: int | None = None

    @property
    def hides_later(self) -> bool:
        """Whether a query sees no token behind its own."""
        return self.causal or self.window is not None
