"""A page to explore a history in: history → outline and columns → one HTML file that lays out what is visible."""

from torchlens.viewer.page import Exploration, explore

__all__ = ["Exploration", "explore"]
