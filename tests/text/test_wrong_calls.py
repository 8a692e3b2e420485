"""Calls that people get wrong: each is told what it should have been."""

import copy
import re
import subprocess
import sys
import warnings
from collections import UserDict
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from torch import nn

import torchlens as tl
from tests.networks import MLP, Residual
from torchlens._capture.options import LogOptions
from torchlens._compat.torchlens_names import (
    ENTRY_NAMES,
    FUNCTION_NAMES,
    HISTORY_NAMES,
    OPTION_NAMES,
)
from torchlens._draw.draw_options import DrawKeywords, DrawOptions
from torchlens._history.classic import ENTRY_FIELDS, ENTRY_METHODS, HISTORY_FIELDS


class Two(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b


class Pair(nn.Module):
    def forward(self, pair: Any) -> torch.Tensor:
        assert isinstance(pair, tuple | list)
        return pair[0] + pair[1]


X = torch.rand(2, 4)


@pytest.fixture(scope="module")
def history() -> tl.ModelHistory:
    return tl.log_forward_pass(MLP(), X)


# -- inputs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((X, X), {}, ("input_kwargs must be a dict of keyword arguments of the model, or None, got "
                     "a Tensor of shape")),
        ((X, X), {}, "To give the model several arguments, make a list of them: [a, b]."),
        ((X, X, X), {}, "To give the model several arguments, make a list of them: [a, b]."),
        ((X, [X]), {}, "got a list of 1. To give the model several arguments, make a list of them"),
        ((X, "all"), {}, ("got 'all' (str). Give options by name, such as layers_to_save='all' or "
                         "vis_opt='rolled'.")),
        (({"a": X, "b": X},), {}, ("as input_args is one argument. To give arguments by name: "
                                  "input_kwargs=that_dict")),
        (({"q": X},), {}, "Give positional arguments as a list, named ones as input_kwargs={...}"),
        ((), {"a": X, "b": X}, ("has no option 'a'. It is an argument of Two.forward: give it as "
                               "input_kwargs={'a': ...}")),
        ((X,), {"b": X}, ("has no option 'b'. It is an argument of Two.forward: give it as "
                         "input_kwargs={'b': ...}")),
        (((X, X, X),), {}, ("Two.forward(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor cannot "
                           "be called with")),
    ],
)  # fmt: skip
def test_inputs_that_were_given_the_wrong_way(arguments: Any, options: dict[str, Any], words: str):
    with pytest.raises(TypeError, match=re.escape(words)):
        tl.log_forward_pass(Two(), *arguments, **options)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (X, "got a Tensor of shape (2, 4). The model is the first argument."),
        (MLP, "got the class MLP. Make an instance of it."),
        (None, "model must be a torch.nn.Module, got None."),
    ],
)
def test_a_model_that_is_none(model: Any, words: str):
    with pytest.raises(TypeError, match=re.escape(words)):
        tl.log_forward_pass(model, X)


def test_a_tuple_is_one_argument_where_the_model_takes_one():
    together = torch.rand(2, 4), torch.rand(2, 4)
    for given in (together, [together]):
        log = tl.log_forward_pass(Pair(), given)
        assert torch.equal(log["add_1"].tensor_contents, together[0] + together[1])
        assert [log[label].input_output_address for label in log.input_layers] == [
            "input.pair.0",
            "input.pair.1",
        ]
    assert len(tl.log_forward_pass(Two(), together).input_layers) == 2
    assert tl.validate_saved_activations(Pair(), together)
    log.save_new_activations(Pair(), (X, 2 * X))
    assert torch.equal(log["add_1"].tensor_contents, X + 2 * X)


def test_a_tuple_is_one_argument_where_the_others_came_by_name():
    class Masked(nn.Module):
        def forward(self, pair: Any, mask: torch.Tensor) -> torch.Tensor:
            return (pair[0] + pair[1]) * mask

    log = tl.log_forward_pass(Masked(), (X, X), {"mask": X})
    assert log["input.pair.1"].layer_label == "input_1_0"
    with pytest.raises(
        TypeError, match="cannot be called with"
    ):  # three for two: a mistake, and not one argument
        tl.log_forward_pass(Masked(), (X, X, X))


def test_a_tuple_that_turned_out_to_be_one_argument_is_told_when_the_model_raises():
    with pytest.raises(TypeError) as caught:
        tl.log_forward_pass(nn.Linear(4, 4), (X, X))
    assert (
        "Linear.forward takes one argument, so the tuple in input_args was given to it"
        in caught.value.__notes__[-1]
    )
    with pytest.raises(
        TypeError, match="cannot be called with"
    ) as caught:  # a list is always several
        tl.log_forward_pass(nn.Linear(4, 4), [X, X])


def test_a_mapping_serves_as_keyword_arguments():
    batch = UserDict(a=X, b=X)  # as the tokenizers of transformers make them
    assert tl.log_forward_pass(Two(), None, batch).layer_labels == [
        "input_1_0",
        "add_1_1",
        "output_1_2",
    ]
    assert tl.validate_saved_activations(Two(), None, batch)


def test_a_mapping_that_was_taken_for_one_argument_is_told_when_the_model_raises():
    class Tokens(nn.Module):
        def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            return tokens + 1

    for batch in ({"tokens": X, "mask": X}, UserDict(tokens=X)):
        with pytest.raises(TypeError) as caught:
            tl.log_forward_pass(Tokens(), batch)
        assert (
            "in input_args was given to Tokens.forward as one argument"
            in caught.value.__notes__[-1]
        )
        assert caught.value.__notes__[-1].endswith("To give its items by name: input_kwargs=...")


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        (
            nn.Linear,
            (
                "got the class Linear. To save the outputs of all modules of that class: "
                "layers_to_save=[name for"
            ),
        ),
        (
            [nn.Linear],
            (
                "got the class Linear. To save the outputs of all modules of that class: "
                "layers_to_save=[name for"
            ),
        ),
        (dict, "got the class dict. A key is a layer label"),
        (nn.ReLU(), "got the module ReLU. A module is named by its address in the model"),
        ([lambda entry: True], "got the function <lambda>"),
    ],
)
def test_layers_that_are_none(history: tl.ModelHistory, layers: Any, words: str):
    with pytest.raises(TypeError, match=re.escape(words)):
        tl.log_forward_pass(MLP(), X, layers_to_save=layers)
    with pytest.raises(TypeError, match=re.escape(words)):
        history.save_new_activations(MLP(), X, layers_to_save=layers)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("vis_mode", "has no option 'vis_mode'. Use vis_opt."),
        ("save_only", "has no option 'save_only'. Use vis_save_only."),
        ("save", "has no option 'save'. Use layers_to_save."),
        ("layer_to_save", "has no option 'layer_to_save'. Did you mean 'layers_to_save'?"),
        (
            "vis_nesting_level",
            "has no option 'vis_nesting_level'. Did you mean 'vis_nesting_depth'?",
        ),
        ("qqq", "has no option 'qqq'. Available: layers_to_save, keep_unsaved_layers,"),
        ("vis_qqq", "has no option 'vis_qqq'. Available: vis_opt, vis_nesting_depth,"),
    ],
)
def test_an_option_that_is_none(name: str, words: str):
    with pytest.raises(TypeError, match=re.escape(f"log_forward_pass() {words}")):
        tl.log_forward_pass(MLP(), X, **{name: "unrolled"})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("layers_to_save", ("it draws, and returns no log. Use log_forward_pass(model, x, "
                           "layers_to_save=")),
        ("save", "it draws, and returns no log. Use log_forward_pass(model, x, layers_to_save="),
        ("vis_mode", "has no option 'vis_mode'. Use vis_opt."),
        ("qqq", "has no option 'qqq'. Available: random_seed, and those for drawing (vis_...)."),
        ("x", "It is an argument of MLP.forward"),
    ],
)  # fmt: skip
def test_an_option_that_show_model_graph_has_not(name: str, words: str):
    with pytest.raises(TypeError, match=re.escape(words)):
        tl.show_model_graph(MLP(), X, **{name: "all"})


def test_numpy_counts_as_well(history: tl.ModelHistory):
    one = np.int64(1)
    assert history[one] == history[1]
    log = tl.log_forward_pass(MLP(), X, layers_to_save=[one, 2], random_seed=one)
    assert log.layers_with_saved_activations == history.layer_labels[1:3]
    assert type(log.random_seed_used) is int
    assert tl.log_forward_pass(MLP(), X, layers_to_save=one).num_tensors_saved == 1
    assert DrawOptions(vis_nesting_depth=one).vis_nesting_depth == 1
    history.summary(depth=one)


def test_an_editor_completes_every_drawing_option():
    typed, checked = get_type_hints(DrawKeywords), get_type_hints(DrawOptions)
    assert typed == {name: hint for name, hint in checked.items() if name != "vis_opt"}
    for function in (tl.log_forward_pass, tl.show_model_graph, tl.ModelHistory.render_graph):
        assert function.__annotations__["vis_options"] == "Unpack[DrawKeywords]"


def test_nothing_is_no_way_to_draw():
    with pytest.raises(
        ValueError, match="vis_opt must be 'none', 'rolled' or 'unrolled', got None"
    ):
        tl.show_model_graph(MLP(), X, vis_opt=None)


def test_all_in_a_list():
    assert tl.log_forward_pass(MLP(), X, layers_to_save=["all"]).num_tensors_saved == 5
    assert tl.log_forward_pass(MLP(), X, layers_to_save=("None",)).num_tensors_saved == 0


def test_a_path_asks_for_a_drawing(tmp_path: Path):
    tl.log_forward_pass(MLP(), X, vis_outpath=tmp_path / "a.gv", vis_fileformat="gv")
    tl.log_forward_pass(
        MLP(), X, vis_opt="none", vis_outpath=tmp_path / "b.gv", vis_fileformat="gv"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["a.gv"]


def test_a_folder_is_no_file(history: tl.ModelHistory, tmp_path: Path):
    for write in (history.explore, history.to_json):
        with pytest.raises(
            ValueError,
            match=r"path must name a file, got the folder .*Name a file in it, such as '.*model",
        ):
            write(tmp_path)
        with pytest.raises(ValueError, match=r"path must name a file, got the folder"):
            write(f"{tmp_path}/new/")
        with pytest.raises(
            TypeError, match=r"path must name a file, such as 'model\.\w+', got 5 \(int\)"
        ):
            write(5)
    assert list(tmp_path.iterdir()) == []


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("activation", "'LayerEntry' has no field 'activation'. Use tensor_contents."),
        ("func_name", "'LayerEntry' has no field 'func_name'. Use func_applied_name."),
        ("out", "'LayerEntry' has no field 'out'. Use tensor_contents."),
        (
            "tensor_contnets",
            "'LayerEntry' has no field 'tensor_contnets'. Did you mean 'tensor_contents'?",
        ),
        ("qqq", "'LayerEntry' has no field 'qqq'. help(torchlens.LayerEntry) lists them."),
    ],
)
def test_a_field_that_an_entry_has_not(history: tl.ModelHistory, name: str, words: str):
    with pytest.raises(AttributeError) as caught:
        getattr(history[1], name)
    assert str(caught.value) == words
    assert not hasattr(history[1], name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("draw", "'ModelHistory' has no field 'draw'. Use render_graph()."),
        (
            "modules",
            (
                "'ModelHistory' has no field 'modules'. Use module_addresses; module_types, "
                "module_children,"
            ),
        ),
        ("layer_lists", "'ModelHistory' has no field 'layer_lists'. Did you mean 'layer_list'?"),
        ("qqq", "'ModelHistory' has no field 'qqq'. help(torchlens.ModelHistory) lists them."),
        (
            "tensor_contents",
            (
                "each of its entries has. Use history[0].tensor_contents, or "
                "[entry.tensor_contents for entry"
            ),
        ),
    ],
)
def test_a_field_that_a_history_has_not(history: tl.ModelHistory, name: str, words: str):
    with pytest.raises(AttributeError, match=re.escape(words)):
        getattr(history, name)


@pytest.mark.parametrize("module", ["torchlens", "torcheer"])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("log", "has no attribute 'log'. Use log_forward_pass(model, x)."),
        ("save", "has no attribute 'save'. Use "),
        ("log_forwad_pass", "has no attribute 'log_forwad_pass'. Did you mean 'log_forward_pass'?"),
        ("qqq", f"has no attribute 'qqq'. Available: {tl.__all__[0]},"),
    ],
)
def test_a_function_that_is_none(module: str, name: str, words: str):
    library = __import__(module)
    with pytest.raises(AttributeError, match=re.escape(words)):
        getattr(library, name)
    assert not hasattr(library, name)


def test_drawing_by_the_name_that_many_try_first():
    with pytest.raises(AttributeError, match=r"Use show_model_graph\(model, x\), or history"):
        tl.draw  # noqa: B018


def test_logging_by_the_name_that_the_public_one_has_since_its_version_2():
    with pytest.raises(AttributeError, match=r"Use log_forward_pass\(model, x\)\."):
        tl.trace  # noqa: B018


def test_the_hint_is_given_once():
    """Python adds a guess of its own to an AttributeError that names the object."""
    code = (
        "import torch, torchlens as tl\ntl.log_forward_pass(torch.nn.ReLU(), "
        "torch.rand(3))[0].tensor_contnets"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    ).stderr
    assert told.count("Did you mean") == 1


def test_what_python_and_others_ask_every_object_for_is_refused_plainly(history: tl.ModelHistory):
    for thing in (history, history[1]):
        for name in (
            "__array__",
            "_repr_html_",
            "_ipython_display_",
            "__torch_function__",
            "_missing",
        ):
            with pytest.raises(AttributeError, match=f"object has no attribute '{name}'"):
                getattr(thing, name)
    with pytest.raises(AttributeError, match="has no attribute '__wrapped__'"):
        tl.__wrapped__  # noqa: B018
    assert copy.copy(history[1]) == history[1]
    assert copy.copy(history).layer_labels == history.layer_labels
    bare = object.__new__(tl.LayerEntry)  # as pickle makes it
    assert not hasattr(bare, "_log")


def test_an_attribute_error_inside_a_field_is_not_taken_for_a_missing_field(
    history: tl.ModelHistory,
):
    class Broken(tl.LayerEntry):
        __slots__ = ()

        @property
        def layer_type(self) -> str:
            return None.upper()  # type: ignore[attr-defined]

    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'upper'"):
        Broken(history[1]._log, 1).layer_type  # noqa: B018

    class Hollow(tl.ModelHistory):
        @property
        def _lookup(self) -> Any:
            return None.upper()  # type: ignore[attr-defined]

    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'upper'"):
        Hollow(history._log)[0]


@pytest.mark.parametrize(
    ("table", "owner"),
    [(FUNCTION_NAMES, tl), (HISTORY_NAMES, tl.ModelHistory), (ENTRY_NAMES, tl.LayerEntry)],
    ids=["functions", "history", "entry"],
)
def test_every_hint_names_what_is_there(table: dict[str, str], owner: Any):
    known = {*dir(tl), *dir(tl.ModelHistory), *dir(tl.LayerEntry), *option_names()}
    known |= {*HISTORY_FIELDS, *ENTRY_FIELDS, *ENTRY_METHODS}
    for foreign, ours in table.items():
        assert foreign not in dir(owner), f"{foreign} is a name of ours now"
        named = set(re.findall(r"[a-z]+_\w+", re.sub(r"'[^']*'|torch\.load\(.*\)", "", ours)))
        assert named <= known, foreign


def option_names() -> set[str]:
    return {field.name for options in (LogOptions, DrawOptions) for field in fields(options)}


def test_every_hint_for_an_option_names_one():
    for foreign, ours in OPTION_NAMES.items():
        assert ours in option_names() | {"input_args", "input_kwargs"}
        with pytest.raises(TypeError, match=re.escape(f"has no option {foreign!r}. Use {ours}.")):
            tl.log_forward_pass(MLP(), X, **{foreign: None})


# -- warnings --------------------------------------------------------------------------------------


def test_warnings_point_at_the_line_that_called(tmp_path: Path):
    history = tl.log_forward_pass(Residual(), torch.rand(2, 4))
    small: Any = {"vis_max_nodes": 1, "vis_outpath": tmp_path / "a.gv", "vis_fileformat": "gv"}

    class PerRow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.vmap(torch.sin)(x)

    calls = [
        lambda: history.render_graph(**small),
        lambda: tl.show_model_graph(Residual(), torch.rand(2, 4), **small),
        lambda: tl.log_forward_pass(Residual(), torch.rand(2, 4), **small),
        lambda: tl.log_forward_pass(PerRow(), torch.rand(2, 4)),
        lambda: tl.get_model_metadata(PerRow(), torch.rand(2, 4)),
        lambda: tl.log_forward_pass(MLP(), X, layers_to_save="fc1").first_nonfinite(),
    ]
    for call in calls:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        assert [(warning.filename, warning.lineno) for warning in caught] == [
            (__file__, call.__code__.co_firstlineno)
        ]


# -- what is written and read ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda h: h.to_json(indent="a"), "indent must be a whole number, got 'a' (str)."),
        (lambda h: h.to_json(indent=-1), "indent must be at least 0, got -1."),
        (
            lambda h: tl.diff(h, h).to_json(indent=2.5),
            "indent must be a whole number, got 2.5 (float).",
        ),
        (
            lambda h: tl.diff(h, h).to_json(3),
            "path must name a file, such as 'model.json', got 3 (int).",
        ),
        (lambda h: tl.diff(h, h).text("wide"), "width must be a whole number, got 'wide' (str)."),
        (
            lambda h: h.explore(None, overlays=3),
            "overlays must be a dict such as {'importance': {'conv2d_1_1'",
        ),
        (
            lambda h: h.explore(None, overlays={"a": {"linear_1": "much"}}),
            "An overlay must give a number for 'linear_1', got 'much' (str).",
        ),
        (
            lambda h: h.explore(None, title=3),
            "title must be text, or None for the name of the model, got 3 (int).",
        ),
        (lambda h: tl.explore_together(h, h, None, title=3), "title must be text, or None"),
        (
            lambda h: tl.explore_together(h, h, None, pairs=3),
            "pairs must be a list of tuples (a, b) or of dicts, got 3 (int).",
        ),
        (
            lambda h: tl.read_trace(None),
            "path must name a file, such as 'trace.safetensors', got None.",
        ),
        (
            lambda h: tl.magnify(3),
            "path must name a file, such as 'trace.safetensors', got 3 (int).",
        ),
        (
            lambda h: tl.sinks.TensorBoard(3),
            "folder must name a folder, such as 'tb/a', got 3 (int).",
        ),
    ],
)
def test_a_wrong_argument_of_what_writes_or_reads_is_told(
    history: tl.ModelHistory, call: Any, words: str
):
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        call(history)


def test_the_model_comes_first_wherever_it_is_given(tmp_path: Path):
    calls: list[Any] = [
        tl.profile,
        tl.show_model_graph,
        tl.validate_saved_activations,
        tl.tail,
        tl.monitor,
    ]
    for call in calls:
        with pytest.raises(
            TypeError, match=r"got a Tensor of shape .* The model is the first argument\.$"
        ):
            call(X, tmp_path / "a")
