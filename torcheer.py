"""Another name for torchlens: `import torcheer as tl`."""

from torchlens import *  # noqa: F403
from torchlens import __all__, __dir__, __getattr__, __version__  # noqa: F401
