"""Twenty models of the zoo; `make zoo` checks them all."""

import importlib.util

import pytest

from benchmarks.zoo import SPECIMENS
from benchmarks.zoo.check import check

SAMPLE = (
    "torch.nn/LSTM-packed",
    "torch.nn/GRUCell",
    "torch.nn/MultiheadAttention-attn_mask",
    "torch.nn/Transformer-masked",
    "torch.nn/TransformerEncoder-nested",
    "torch.nn/activations_inplace",
    "torch.nn/embeddings",
    "torch.nn/parametrizations",
    "torchvision/mobilenet_v3_small",
    "torchvision/squeezenet1_1",
    "timm/test_mambaout",
    "timm/test_nfnet",
    "transformers/albert",
    "transformers/bert",
    "transformers/gpt2",
    "transformers/mamba",
    "transformers/vit",
    "torch_geometric/GAT",
    "torch_geometric/GCN",
    "torch_geometric/TopKPooling",
)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_model_from_elsewhere_is_logged_as_it_runs(name: str) -> None:
    specimen = SPECIMENS[name]
    if importlib.util.find_spec(specimen.source) is None:
        pytest.skip(f"needs {specimen.source}: pip install 'torchlens[zoo]'")
    result = check(specimen)
    assert result.reasons == [], result.trace
    if result.absence:
        pytest.skip(result.absence)
    assert result.validated
    assert result.entries > 2


def test_a_model_that_lies_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks can fail: a log that holds another output than the model returned is told."""
    import torchlens as tl

    log = tl.log_forward_pass

    def log_wrongly(*args, **kwargs):
        history = log(*args, **kwargs)
        history[history.output_layers[0]].tensor_contents.add_(1)
        return history

    monkeypatch.setattr(tl, "log_forward_pass", log_wrongly)
    result = check(SPECIMENS["torch.nn/RNN-plain"])
    assert not result.passed
