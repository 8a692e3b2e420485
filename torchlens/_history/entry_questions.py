"""Questions to one entry that other packages answer."""

from typing import TYPE_CHECKING

import torch

from torchlens._history.field import EntryFields

if TYPE_CHECKING:
    from torchlens._attention.attention import Attention


class EntryQuestions(EntryFields):
    """Questions to one entry; what answers them is imported when they are asked."""

    __slots__ = ()

    def attention(self, head: int | None = None) -> "Attention":
        """The attention of this operation: a fused kernel, a softmax, or what multiplies the values
        with it; see `history.attention`.
        """
        from torchlens._attention.choice import entry_attention

        return entry_attention(self._log, self._entry, head)

    def attention_weights(self, head: int | None = None) -> torch.Tensor:
        """The weights of `attention()`, as (..., heads, queries, keys), or those of one head.

        >>> history['scaleddotproductattention_1'].attention_weights(head=3)
        """
        return self.attention(head).weights
