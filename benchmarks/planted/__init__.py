"""Ports of models with mistakes planted in them: how many of them `torchlens.diff` locates."""
