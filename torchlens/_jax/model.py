"""A JAX callable in the form that the public functions take models in."""

from typing import Any

import jax

from torchlens._capture.options import CaptureOptions
from torchlens._jax.callables import called, name_of
from torchlens._jax.patches import without_jit
from torchlens._jax.session import JaxSession
from torchlens._recording.frameworks import OtherModel


class JaxModel(OtherModel):
    """A function, a jitted one, a module of Equinox or nnx, the `apply` of a linen module, a dict
    of layers.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.forward = called(model)
        self.name = name_of(self.forward)

    def run_plainly(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """What the callable returns where nobody logs, with jit off as in a log."""
        with without_jit(object()):
            return jax.block_until_ready(self.forward(*args, **kwargs))

    def session(self, options: CaptureOptions) -> JaxSession:
        return JaxSession(self.forward, self.name, options)
