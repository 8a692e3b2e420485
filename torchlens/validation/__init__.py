"""Proves a log against its model."""

from torchlens.validation.report import Finding, ValidationReport
from torchlens.validation.validate import validate_forward_pass, validate_saved_activations

__all__ = ["Finding", "ValidationReport", "validate_forward_pass", "validate_saved_activations"]
