"""The fields of a `LayerEntry` as users read them, a sentence each. What they mean: `columns`, in the file named alike."""

from torchlens.history.entry_fields.calls import CallFields
from torchlens.history.entry_fields.labels import LabelFields
from torchlens.history.entry_fields.modules import ModuleFields
from torchlens.history.entry_fields.surroundings import SurroundingFields
from torchlens.history.entry_fields.tensors import TensorFields

__all__ = ["CallFields", "LabelFields", "ModuleFields", "SurroundingFields", "TensorFields"]
