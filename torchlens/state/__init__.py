"""What running a model may change: kept before, compared and put back after, unseen by whatever watches the model."""

from torchlens.state.apart import apart
from torchlens.state.kept_tensor import KeptTensor, copy_of
from torchlens.state.model_state import State

__all__ = ["KeptTensor", "State", "apart", "copy_of"]
