"""Compares two histories: where they diverge, and why."""

from torchlens.comparing.compare import compare_histories
from torchlens.comparing.diff import BaseDiff, Divergence, Pair

__all__ = ["BaseDiff", "Divergence", "Pair", "compare_histories"]
