"""docs/coming-from-torchexplorer.md names every word that the code knows of, and the code takes
them or says what to do.
"""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import torchlens as tl
from torchlens._compat.monitor_names import LOG_WORDS, MONITOR_FUNCTIONS, MONITOR_OPTIONS, RUN_NAMES
from torchlens._monitor.record.series import KINDS

PAGE = (Path(__file__).parents[2] / "docs" / "coming-from-torchexplorer.md").read_text()


def test_the_page_has_every_option_and_word() -> None:
    assert [name for name in (*MONITOR_OPTIONS, *LOG_WORDS, "log_freq") if name not in PAGE] == []
    theirs = [
        "setup",
        "watch",
        "attach",
        "unwatch",
        "ParrallelHandler",
        "DataRecorder",
        "track_model",
        "track_layer",
    ]
    assert [name for name in theirs if name not in PAGE or name not in MONITOR_FUNCTIONS] == []


def test_words_of_others_are_taken(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with tl.monitor(model, tmp_path / "a", log=["io", "params_grad"], log_freq=7) as run:
        assert run.options.log == {"inputs", "outputs", "parameter_gradients"}
        assert run.options.every == 7
    with tl.monitor(model, tmp_path / "b", log="all") as run:
        assert run.options.log == set(KINDS)
    with tl.monitor(model, tmp_path / "c", log=[]) as run:
        assert run.options.log == set()


def test_other_words_are_refused_with_what_to_write(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for name, cure in MONITOR_OPTIONS.items():
        given: dict[str, Any] = {name: 1}
        with pytest.raises(TypeError) as caught:
            tl.monitor(model, tmp_path / "a", **given)
        assert str(caught.value) == f"monitor() has no option {name!r}. Instead: {cure}."
    with pytest.raises(TypeError, match=r"monitor\(\) has no option 'evry'. Available: every, log"):
        tl.monitor(model, tmp_path / "a", evry=3)
    assert not (tmp_path / "a").exists()
    for name, cure in MONITOR_FUNCTIONS.items():
        with pytest.raises(AttributeError) as caught_too:
            getattr(tl, name)
        assert str(caught_too.value).endswith(f"Use {cure}.")
    with tl.monitor(model, tmp_path / "b") as run:
        for name, cure in RUN_NAMES.items():
            with pytest.raises(AttributeError, match="'Run' has no attribute") as caught_too:
                getattr(run, name)
            assert str(caught_too.value).endswith(f"Use {cure}.")
        assert not hasattr(run, "_anything")
