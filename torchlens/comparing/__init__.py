"""Compares two histories: where they part, and why. This is the room's one door."""

from torchlens.comparing.compare import compare_histories
from torchlens.comparing.diff import BaseDiff, Divergence, Pair

__all__ = ["BaseDiff", "Divergence", "Pair", "compare_histories"]
