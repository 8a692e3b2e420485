"""The fields of a history as users read them, a sentence each."""

from torchlens.history.history_fields.layers import LayerFields
from torchlens.history.history_fields.modules import ModuleFields
from torchlens.history.history_fields.totals import TotalFields

__all__ = ["LayerFields", "ModuleFields", "TotalFields"]
