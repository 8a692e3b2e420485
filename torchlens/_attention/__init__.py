"""The attention of a model: which calls compute it, and with which weights."""
