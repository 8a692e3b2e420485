"""Interventions: models and recorded calls run again with edits; sweeps; attribution."""
