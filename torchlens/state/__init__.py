"""The state that running a model may change: saved before, compared and restored after, unseen by whatever observes it."""

from torchlens.state.apart import apart
from torchlens.state.kept_tensor import KeptTensor, copy_of
from torchlens.state.model_state import State

__all__ = ["KeptTensor", "State", "apart", "copy_of"]
