"""Measures what each module and operation does to time, memory and numbers."""

from torchlens.profiling.health.findings import Finding
from torchlens.profiling.options import ProfileOptions
from torchlens.profiling.profile import Profile
from torchlens.profiling.trial import run_trial

__all__ = ["Finding", "Profile", "ProfileOptions", "run_trial"]
