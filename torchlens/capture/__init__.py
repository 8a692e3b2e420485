"""Runs the model and writes down what happened. Knows torch, knows no history."""
