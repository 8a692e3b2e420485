"""A page to explore a history in, or two: history → outline and columns → one HTML file that lays out what is visible."""

from torchlens.viewer.page import Exploration, explore
from torchlens.viewer.pairs import Pair
from torchlens.viewer.together import explore_together

__all__ = ["Exploration", "Pair", "explore", "explore_together"]
