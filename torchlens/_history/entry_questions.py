"""Questions to one entry that other packages answer."""

from typing import TYPE_CHECKING

import torch

from torchlens._history.field import EntryFields

if TYPE_CHECKING:
    from torchlens._attention.attention import Attention
    from torchlens._receptive.fields import Field, Unit


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

    def receptive_field(self, unit: "Unit | None" = None) -> "Field":
        """Which elements of the inputs a unit of this layer can depend on; see
        `history.receptive_field`.
        """
        from torchlens._receptive.fields import receptive_field

        return receptive_field(self._log, self._entry, unit, self._log.graph.inputs)

    def projective_field(self, unit: "Unit | None" = None) -> "Field":
        """Which elements of the outputs a unit of this layer can change; see
        `history.projective_field`.
        """
        from torchlens._receptive.fields import projective_field

        return projective_field(self._log, self._entry, unit, self._log.graph.outputs)
