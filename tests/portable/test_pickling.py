"""A history that was pickled, saved or copied is the same history, also in a process that never saw
the model.
"""

import copy
import functools
import io
import multiprocessing
import os
import pickle
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import torchlens as tl
from tests.failures import partial_history
from tests.networks import (
    MLP,
    Conditional,
    ConvNet,
    Model,
    Recurrent,
    Residual,
    TinyGPT,
    writes_through_views,
)
from tests.portable.facts import differences, facts_of
from torchlens._portable import pickling
from torchlens._recording.functions import StandIn


def by_torch(history: Any) -> Any:
    file = io.BytesIO()
    torch.save(history, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def by_pickle(history: Any, protocol: int = pickle.DEFAULT_PROTOCOL) -> Any:
    return pickle.loads(pickle.dumps(history, protocol))


WAYS: dict[str, Callable[[Any], Any]] = {
    **{
        f"protocol {number}": functools.partial(by_pickle, protocol=number)
        for number in range(2, pickle.HIGHEST_PROTOCOL + 1)
    },
    "torch.save": by_torch,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}
# The newest protocol is enough while one works: a pickle is plain data, which all protocols write.
_REPEATS = ("protocol 2", "protocol 3", "protocol 4")
# Those that a process without the model's code might read in another way.
_READ_ELSEWHERE = (
    "convnet in training", "gradients of views", "partial", "changed since", "kinds of tensors",
    "subclass", "postfunc, pairs",
)  # fmt: skip
way_of = pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, id=name, marks=[pytest.mark.soak] if name in _REPEATS else [])
        for name, way in WAYS.items()
    ],
)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy(x.detach().numpy() * 2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Marked(torch.Tensor):
    """A tensor with a class of its own."""


class Settings:
    """Equal only to itself."""


class Mode(Enum):
    FAST = 1


class Pair(NamedTuple):
    left: Any
    right: Any


def twins(self, x):
    a, b = x.split(2, dim=1)
    c = torch.cat([a, b], dim=1).contiguous()
    return {"same": nn.Identity()(c), "max": c.max(dim=1), ("odd", Mode.FAST): c[:, 1:].T}


def kinds(self, x):
    sparse = x.to_sparse()
    nested = torch.nested.nested_tensor([x[0], x[1, :2]])
    complex_ = torch.complex(x, x).conj()
    quantized = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
    return (
        sparse.to_dense()
        + complex_.imag
        + quantized.dequantize()
        + nested.to_padded_tensor(0.0).sum()
    )


def script(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


def odd_arguments(self, x):
    y = x.map_(x, lambda a, b: a + b) if not x.requires_grad else x.clone()
    y = torch.func.vmap(lambda row: row * 2)(y)
    y = self.scripted(y)
    y = Double.apply(y)
    return y.sum(tuple(Pair(0, 1)))


def saved_grad(model: nn.Module, x: torch.Tensor, **options: Any) -> Any:
    history = tl.log_forward_pass(model, x, save_gradients=True, **options)
    history.layer_list[-1].tensor_contents.float().square().sum().backward()
    return history


def logged_backward() -> Any:
    history = tl.log_forward_pass(
        Model(writes_through_views, fc=nn.Linear(4, 4)), torch.rand(3, 4, requires_grad=True)
    )
    history.log_backward(history["output_1"].tensor_contents.sum())
    return history


def partial() -> Any:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(3, 2))
    with pytest.raises(RuntimeError) as caught:
        tl.log_forward_pass(model, torch.rand(2, 4))
    return partial_history(caught.value)


def changed() -> Any:
    history = tl.log_forward_pass(MLP(), torch.rand(2, 4))
    history["relu_1"].tensor_contents.detach().zero_()
    return history


def unseen_views() -> Any:
    with torch.inference_mode():
        return tl.log_forward_pass(Model(twins), torch.rand(3, 4))


def kinds_of_tensors() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that some of these are new, others old
        return tl.log_forward_pass(Model(kinds), torch.rand(2, 3), save_function_args=True)


HISTORIES: dict[str, Callable[[], Any]] = {
    "mlp": lambda: tl.log_forward_pass(MLP(), torch.rand(2, 4)),
    "residual, all arguments": lambda: tl.log_forward_pass(
        Residual(),
        torch.rand(2, 4),
        save_function_args=True,
        mark_input_output_distances=True,
        random_seed=3,
    ),
    "convnet in training": lambda: tl.log_forward_pass(ConvNet().train(), torch.rand(2, 3, 8, 8)),
    "recurrent": lambda: tl.log_forward_pass(Recurrent(), torch.rand(2, 4)),
    "conditional": lambda: tl.log_forward_pass(Conditional(), torch.rand(2, 4)),
    "gpt": lambda: tl.log_forward_pass(TinyGPT(), torch.randint(0, 10, (2, 5))),
    "lstm": lambda: tl.log_forward_pass(nn.LSTM(4, 5, num_layers=2), torch.rand(3, 2, 4)),
    "nothing saved": lambda: tl.get_model_metadata(Residual(), torch.rand(2, 4)),
    "some saved": lambda: tl.log_forward_pass(
        Recurrent(),
        torch.rand(2, 4),
        layers_to_save=["linear", "output"],
        keep_unsaved_layers=False,
    ),
    "gradients": lambda: saved_grad(ConvNet(), torch.rand(2, 3, 8, 8)),
    "gradients of views": lambda: saved_grad(
        Model(writes_through_views), torch.rand(3, 4, requires_grad=True)
    ),
    "backward, logged": logged_backward,
    "partial": partial,
    "changed since": changed,
    "writes": lambda: tl.log_forward_pass(Model(writes_through_views), torch.rand(3, 4)),
    "twins": lambda: tl.log_forward_pass(Model(twins), torch.rand(3, 4), save_function_args=True),
    "inference mode": unseen_views,
    "kinds of tensors": kinds_of_tensors,
    "subclass": lambda: tl.log_forward_pass(MLP(), torch.rand(2, 4).as_subclass(Marked)),
    "postfunc": lambda: tl.log_forward_pass(
        MLP(), torch.rand(2, 4), activation_postfunc=lambda t: t.detach().numpy()
    ),
    "postfunc, pairs": lambda: tl.log_forward_pass(
        MLP(),
        torch.rand(2, 4),
        activation_postfunc=lambda t: {
            "mean": t.mean().item(),
            "all": [t.detach(), t.detach().view(-1)],
        },
    ),
    "meta": lambda: tl.log_forward_pass(MLP().to("meta"), torch.rand(2, 4, device="meta")),
    "double, on the same device": lambda: tl.log_forward_pass(
        MLP(), torch.rand(2, 4), output_device="cpu"
    ),
}


_LARGE = ("gpt",)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(make, id=name, marks=[pytest.mark.slow] if name in _LARGE else [])
        for name, make in HISTORIES.items()
    ],
)
def original(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    """A history and its facts, which copying must not change."""
    torch.manual_seed(0)
    history = request.param()
    facts = facts_of(history)
    yield history, facts
    assert differences(facts_of(history), facts) == {}


@pytest.mark.filterwarnings(
    "ignore:TypedStorage is deprecated"
)  # torch uses it itself, for quantized tensors
@way_of
def test_a_copy_is_the_same_in_every_field(original: tuple[Any, Any], way: Callable[[Any], Any]):
    history, facts = original
    copied = way(history)
    assert type(copied) is tl.ModelHistory
    assert copied is not history
    assert differences(facts_of(copied), facts) == {}


@pytest.fixture(scope="module")
def facts_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """Each history, and what it says in another process, in which the classes and functions of this
    file are unknown.
    """
    torch.manual_seed(0)
    histories = {name: HISTORIES[name]() for name in _READ_ELSEWHERE}
    folder = tmp_path_factory.mktemp("elsewhere")
    for number, history in enumerate(histories.values()):
        (folder / f"{number}.history").write_bytes(pickle.dumps(history))
    code = textwrap.dedent(
        """
        import pickle, sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[1])
        sys.modules["tests"] = None  # what stands there is not there
        from facts import facts_of
        for path in Path(sys.argv[2]).glob("*.history"):
            facts = facts_of(pickle.loads(path.read_bytes()))
            path.with_suffix(".facts").write_bytes(pickle.dumps(facts))
        assert "tests.networks" not in sys.modules and "test_pickling" not in sys.modules
        """
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parent), str(folder)]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return {
        name: (history, pickle.loads((folder / f"{number}.facts").read_bytes()))
        for number, (name, history) in enumerate(histories.items())
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("name", _READ_ELSEWHERE)
def test_another_process_that_never_saw_the_model_reads_the_same(
    name: str, facts_elsewhere: dict[str, tuple[Any, Any]]
):
    history, there = facts_elsewhere[name]
    changed = differences(there, facts_of(history))
    if name == "subclass":  # a class that is not known there
        for fact, (one, other) in changed.items():
            assert repr(one) == repr(other).replace("Marked", "Tensor") or fact.endswith("printed")
        changed = {}
    assert changed == {}


def test_what_cannot_come_along_says_so():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Model(odd_arguments, scripted=torch.jit.script(script))
        history = tl.log_forward_pass(model, torch.rand(3, 4))
    copied = by_pickle(history)
    assert copied.layer_labels == history.layer_labels
    functions = {entry.layer_type: entry.func_applied for entry in copied}
    for kind in ("scriptfunction",):
        assert isinstance(functions[kind], StandIn)
        with pytest.raises(tl.TorchLensError, match=r"did not come with it"):
            functions[kind]()
    assert functions["double"] is Double
    assert functions["sum"] is history["sum_1"].func_applied
    assert copied["vmap_1"].func_position_args_non_tensor != []
    assert str(copied["vmap_1"]) == str(history["vmap_1"])
    again = by_pickle(copied)
    assert again.layer_labels == history.layer_labels
    assert again["scriptfunction_1"].func_argnames == history["scriptfunction_1"].func_argnames


def test_objects_among_the_arguments_keep_their_identity():
    settings = Settings()

    @torch.library.custom_op("torchlens_test::noop", mutates_args=())
    def noop(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    history = tl.log_forward_pass(Model(lambda self, x: noop(noop(x))), torch.rand(2))
    assert by_pickle(history).layer_labels == history.layer_labels
    rows = history._log.recording.rows
    for number in (1, 2):
        rows[number] = rows[number]._replace(args=(None, settings, {"of": settings}))
    rows = by_pickle(history)._log.recording.rows
    copied = [rows[number].args for number in (1, 2)]
    assert isinstance(copied[0][1], Settings)
    assert copied[0][1] is copied[0][2]["of"] is copied[1][1]


def test_an_entry_can_be_pickled_alone_and_entries_share_their_log():
    history = tl.log_forward_pass(Recurrent(), torch.rand(2, 4))
    entry = by_pickle(history[3])
    assert entry.layer_label == history[3].layer_label
    assert torch.equal(entry.tensor_contents, history[3].tensor_contents)
    one, other, whole = by_pickle((history[3], history[4], history))
    assert one._log is other._log is whole._log
    assert one == whole[3]
    assert (
        copy.deepcopy(history[3]).parent_layers
        == copy.copy(history[3]).parent_layers
        == history[3].parent_layers
    )


def fail(_: int) -> None:
    tl.log_forward_pass(
        nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(3, 2)), torch.ones(2, 4)
    )


def log(seed: int) -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    return saved_grad(ConvNet(), torch.rand(2, 3, 8, 8))


@pytest.mark.slow
def test_histories_and_failures_come_out_of_worker_processes():
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        histories = list(pool.map(log, (1, 2)))
        failed = pool.submit(fail, 0).exception()
        there = pool.submit(facts_of, log(1)).result()  # and the other way
    here = facts_of(histories[0])
    times = ("elapsed", "printed", "summary", "json", "pandas", "page", "time", "backward_passes")
    assert {
        name
        for name in differences(here, facts_of(log(1)))
        if not any(word in name for word in times)
    } == set()
    assert histories[1].layer_labels == histories[0].layer_labels
    assert not torch.equal(
        histories[1]["conv2d_1"].grad_contents, histories[0]["conv2d_1"].grad_contents
    )
    assert there.keys() == here.keys()
    assert isinstance(failed, RuntimeError)
    assert partial_history(failed).layer_labels == ["input_1_0", "linear_1_1", "relu_1_2"]
    assert "which the exception holds as partial_history" in failed.__notes__[0]


# -- size ------------------------------------------------------------------------------------------


def pieces(self, x):
    return torch.cat([piece + 1 for piece in x.mul(2).split(1)])


@pytest.mark.parametrize(
    "way", [pickle.dumps, lambda history: io_bytes(torch.save, history)], ids=["pickle", "torch"]
)
def test_views_are_written_once(way: Callable[[Any], bytes]):
    history = tl.log_forward_pass(Model(pieces), torch.rand(64, 8192))  # 2 MB, and 64 views of it
    num_bytes = 4 * 64 * 8192 * 4  # input, product, sums, concatenation
    assert num_bytes < len(way(history)) < 1.1 * num_bytes


def io_bytes(write: Callable[[Any, Any], None], value: Any) -> bytes:
    file = io.BytesIO()
    write(value, file)
    return file.getvalue()


@way_of
def test_views_share_memory_as_they_did(way: Callable[[Any], Any]):
    copied = way(tl.log_forward_pass(Model(pieces), torch.rand(4, 4096)))
    whole, *parts = (
        entry.tensor_contents for entry in copied if entry.layer_type in ("mul", "split")
    )
    assert len(parts) == 4
    assert {part.untyped_storage().data_ptr() for part in parts} == {
        whole.untyped_storage().data_ptr()
    }


def test_of_memory_that_is_looked_at_in_part_only_that_part_is_written():
    history = tl.log_forward_pass(
        Model(lambda self, x: x.mul(2)[5:7, 3] + 1),
        torch.rand(10, 300_000),
        layers_to_save="getitem",
    )
    entry = history["getitem_1"]
    assert entry.tensor_contents.untyped_storage().nbytes() > 10_000_000
    assert len(pickle.dumps(history)) < 3_000_000
    for way in WAYS.values():
        assert torch.equal(way(history)["getitem_1"].tensor_contents, entry.tensor_contents)


def test_memory_seen_as_several_types_can_be_saved_by_torch():
    def forward(self, x):
        return (
            torch.view_as_real(torch.view_as_complex(x) * 2).view(torch.int32)
            + x.view(torch.uint8).sum()
        )

    for size in (4, 400_000):  # one below, one above what is written together
        history = tl.log_forward_pass(Model(forward), torch.rand(size, 2))
        assert differences(facts_of(by_torch(history)), facts_of(history)) == {}


# -- parameters ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "way", [by_pickle, by_torch, copy.deepcopy], ids=["pickle", "torch", "deepcopy"]
)
def test_a_history_copied_with_its_model_has_that_models_parameters(way: Callable[[Any], Any]):
    model = ConvNet()
    history = tl.log_forward_pass(model, torch.rand(2, 3, 8, 8))
    other_model, other = way((model, history))
    assert (
        other["conv2d_1"].parent_params[0]
        is dict(other_model.named_parameters())[other["conv2d_1"].parent_param_addresses[0]]
    )
    assert other["conv2d_1"].parent_params[0] is not history["conv2d_1"].parent_params[0]


class Special(nn.Parameter):
    """A parameter of a class of its own."""


def test_parameters_with_attributes_and_classes_of_their_own():
    model: Any = MLP()
    model.fc1.weight.loader = lambda weight: weight
    model.fc2.weight.is_shared_by = "nobody"
    model.fc2.bias = Special(torch.rand(3))
    history = tl.log_forward_pass(model, torch.rand(2, 4))
    params = by_pickle(history)._log.recording.params
    assert [torch.equal(a, b) for a, b in zip(params, model.parameters(), strict=True)] == [
        True
    ] * 4
    assert [type(param) for param in params] == [nn.Parameter] * 4  # torch itself forgets the class
    assert params[2].is_shared_by == "nobody"
    assert all(param.requires_grad for param in params)


def test_the_weights_can_be_left_behind():
    model = nn.Sequential(nn.Linear(500, 500), nn.Linear(500, 2))
    history = tl.log_forward_pass(model, torch.rand(2, 500))
    before = (
        history.summary(width=100).to_pandas(),
        history["linear_1"].parent_param_shapes,
        history.total_params_fsize,
    )
    history.clear_params()
    assert len(pickle.dumps(history)) < 50_000
    copied = by_pickle(history)
    assert copied.summary(width=100).to_pandas().equals(before[0])
    assert copied["linear_1"].parent_param_shapes == before[1]
    assert copied.total_params_fsize == before[2]
    assert copied["linear_1"].parent_params[0].is_meta
    assert not model[0].weight.is_meta


# -- what can be done with a copy ------------------------------------------------------------------


@way_of
def test_a_copy_saves_new_activations(way: Callable[[Any], Any]):
    model, x = MLP(), torch.rand(2, 4)
    history = tl.log_forward_pass(
        model, torch.rand(2, 4), activation_postfunc=torch.sum, output_device="cpu"
    )
    before = history["linear_2"].tensor_contents.item()
    copied = way(history)
    copied.save_new_activations(model, x)
    assert torch.equal(copied["linear_2"].tensor_contents, model(x).sum())
    assert history["linear_2"].tensor_contents.item() == before
    copied.cleanup()
    assert history["linear_2"].tensor_contents.item() == before


def test_a_copy_without_its_postfunc_says_so_before_the_model_runs():
    model = Model(lambda self, x: x + 1)
    history = tl.log_forward_pass(model, torch.rand(2, 4), activation_postfunc=lambda t: t.mean())
    for copied in (copy.copy(history), copy.deepcopy(history)):
        copied.save_new_activations(model, torch.rand(2, 4))
    num_calls = model.num_calls
    with pytest.raises(
        ValueError,
        match=r"by activation_postfunc\. This history is a copy, and .*<lambda> did not come",
    ):
        by_pickle(history).save_new_activations(model, torch.rand(2, 4))
    assert model.num_calls == num_calls


@pytest.mark.parametrize("way", [by_pickle, copy.deepcopy], ids=["pickle", "deepcopy"])
def test_a_copy_cannot_run_backward_and_says_so(way: Callable[[Any], Any]):
    history = tl.log_forward_pass(MLP(), torch.rand(2, 4))
    copied = way(history)
    assert not copied["output_1"].tensor_contents.requires_grad
    assert copied["linear_1"].gradfunc == history["linear_1"].gradfunc == "AddmmBackward0"
    with pytest.raises(
        ValueError, match=r"pickled or deep-copied.* no longer part of an autograd graph"
    ):
        copied.log_backward(copied["output_1"].tensor_contents.sum())
    history.log_backward(history["output_1"].tensor_contents.sum())
    model = MLP()
    copied.save_new_activations(model, torch.rand(2, 4))  # from here on it is a log like any other
    copied.log_backward(copied["output_1"].tensor_contents.sum())
    assert copied["linear_1"].has_saved_grad


def test_a_deep_copy_is_independent():
    history = tl.log_forward_pass(MLP(), torch.rand(2, 4))
    copied = copy.deepcopy(history)
    copied["relu_1"].tensor_contents.zero_()
    with pytest.raises(tl.ValueChangedError):
        copied["relu_1"].tensor_contents  # noqa: B018
    assert history["relu_1"].tensor_contents.sum() > 0


def test_what_hangs_on_a_history_can_be_pickled_too():
    history = saved_grad(MLP(), torch.rand(2, 4))
    summary = by_pickle(history.summary())
    assert str(summary) == str(history.summary())
    assert summary.to_pandas().equals(history.summary().to_pandas())
    assert by_pickle(history.backward_passes) == history.backward_passes
    nan = tl.log_forward_pass(Model(lambda self, x: (x - 5).log()), torch.rand(2, 4))
    assert (
        str(by_pickle(nan.first_nonfinite()))
        == str(nan.first_nonfinite())
        == str(by_pickle(nan).first_nonfinite())
    )


# -- other versions --------------------------------------------------------------------------------


def test_a_pickle_of_another_version_is_refused_before_anything_is_made_of_it(
    monkeypatch: pytest.MonkeyPatch,
):
    history = tl.log_forward_pass(MLP(), torch.rand(2, 4))
    monkeypatch.setattr(pickling, "FORMAT", "99")
    data = pickle.dumps(history)
    monkeypatch.undo()
    monkeypatch.setattr(pickling, "unpacked", None)  # whatever became of the rest
    with pytest.raises(
        tl.TorchLensError, match=r"pickled by torchlens .*format 99\..* log the model again"
    ):
        pickle.loads(data)


def test_the_format_changes_with_the_fields_that_are_kept(monkeypatch: pytest.MonkeyPatch):
    class Write(NamedTuple):
        entry: int
        more: Any

    before = pickling._format()
    monkeypatch.setattr(
        pickling,
        "_KEPT",
        tuple(Write if kind.__name__ == "Write" else kind for kind in pickling._KEPT),
    )
    assert pickling._format() != before
