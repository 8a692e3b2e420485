"""Another name for torchlens: `import torcheer as tl`."""

from torchlens import *  # noqa: F403
from torchlens import __all__  # noqa: F401
