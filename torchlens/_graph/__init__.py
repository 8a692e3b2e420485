"""Turns a recording into a labelled graph. Pure functions from data to data; no torch calls."""
