"""Measures what each module and operation does to time, memory and numbers."""

from torchlens.profile.findings import Finding
from torchlens.profile.options import ProfileOptions
from torchlens.profile.profile import Profile
from torchlens.profile.trial import run_trial

__all__ = ["Finding", "Profile", "ProfileOptions", "run_trial"]
