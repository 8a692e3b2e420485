"""Two profiles side by side."""

from typing import Any, get_args

import pytest
import torch
from torch import nn

import torchlens as tl
from tests.profile.profile_records import MS, call, made_up, module
from torchlens._profile.comparison import compare_measurements
from torchlens._profile.quantities import QUANTITIES, QuantityName
from torchlens._profile.records import Measurements, TypicalSteps
from torchlens._text.measures import MEASURES, short_word


def measured(**seconds: float) -> Measurements:
    """A model with modules that took so long, in milliseconds; '' is the model."""
    steps = TypicalSteps(frozenset({2}), frozenset())
    children = [
        module(name, "Linear", [call(2, name, forward_seconds=time * MS)], [], typical_steps=steps)
        for name, time in seconds.items()
        if name != "model"
    ]
    root = module(
        "",
        "Net",
        [call(2, "", forward_seconds=seconds["model"] * MS)],
        children,
        typical_steps=steps,
    )
    return made_up(root=root)


def test_modules_are_matched_by_address_and_the_largest_change_comes_first():
    changes = compare_measurements(
        measured(model=10, a=2, b=4, gone=1),
        measured(model=7, a=2.5, b=0.5, new=3),
        "forward_time",
        80,
        None,
    )
    assert [change.address for change in changes] == ["b", "", "a", "gone", "new"]
    b = changes["b"]
    assert (b.before, b.after, b.difference) == pytest.approx((4 * MS, 0.5 * MS, -3.5 * MS))
    assert b.ratio == pytest.approx(0.125)
    assert (changes["gone"].after, changes["gone"].difference, changes["gone"].ratio) == (
        None,
        None,
        None,
    )
    lines = str(changes).splitlines()
    assert lines[0] == "forward time of Net in a step: 2 steps before, 2 after"
    assert lines[4].split() == ["b", "Linear", "4.00", "ms", "500", "µs", "-3.50", "ms", "0.12x"]
    assert changes.to_pandas()["address"].tolist() == ["b", "", "a", "gone", "new"]


def test_profiles_of_real_models_are_compared():
    before = tl.profile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.rand(2, 4))
    after = tl.profile(nn.Sequential(nn.Linear(4, 400), nn.ReLU()), torch.rand(2, 4))
    changes = tl.compare(before, after, "flops")
    assert (changes["0"].before, changes["0"].after) == (2 * 2 * 4 * 4, 2 * 2 * 4 * 400)
    assert len(tl.compare(before, after)) == 3
    assert "The first 1 of 3 modules." in str(tl.compare(before, after, limit=1))


@pytest.mark.parametrize("word", [*MEASURES, *QUANTITIES])
def test_every_word_is_understood(word: Any):
    p = tl.profile(nn.Sequential(nn.Linear(256, 256), nn.ReLU()), torch.rand(64, 256))
    changes = tl.compare(p, p, word)
    assert {change.ratio for change in changes} <= {None, 1.0}
    assert "(the model)" in str(changes)


def test_steps_are_compared_with_their_like():
    def run(model, num_evaluations):
        with tl.profile(model) as p:
            model.train()(torch.rand(2, 4))
            for _ in range(num_evaluations):
                model.eval()(torch.rand(2, 4))
        return p

    class Switched(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 400)

        def forward(self, x):
            return self.one(x) if self.training else self.other(x)

    before, after = run(Switched(), 3), run(Switched(), 1)
    changes = tl.compare(before, after, "flops")
    assert str(changes).startswith(
        "FLOPs of Switched in a step of evaluation: 3 steps before, 1 after"
    )
    assert (changes[""].before, changes[""].after) == (2 * 2 * 4 * 400,) * 2
    changes = tl.compare(before, after, "flops", step_kind="training")
    assert (changes[""].before, changes[""].after) == (2 * 2 * 4 * 4,) * 2
    with pytest.raises(
        ValueError, match="step_kind must be 'training' or 'evaluation', got 'test'"
    ):
        tl.compare(before, after, step_kind="test")


def test_wrong_arguments_raise():
    p = tl.profile(nn.ReLU(), torch.rand(2))
    with pytest.raises(TypeError, match=r"after must be a Profile, as .* got 3"):
        tl.compare(p, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"quantity must be .* got 'speed'"):
        tl.compare(p, p, "speed")  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="No module 'fc'"):
        tl.compare(p, p)["fc"]


def test_a_type_checker_knows_every_quantity():
    known = {word for words in get_args(QuantityName) for word in get_args(words)}
    assert known == {*QUANTITIES, *map(short_word, QUANTITIES)}


def test_a_note_says_that_steps_differ_in_kind():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def profiled(is_training: bool = True, has_grad: bool = True, rows: int = 2) -> tl.Profile:
        model.train(is_training)
        with tl.profile(model) as p, torch.set_grad_enabled(has_grad):
            model(torch.rand(rows, 4))
        return p

    usual = profiled()
    told = {
        "training before, evaluation after": profiled(is_training=False),
        "with gradients before, without gradients after": profiled(has_grad=False),
        "inputs 2x4 before, inputs 5x4 after": profiled(rows=5),
    }
    for words, other in told.items():
        assert tl.compare(usual, other).unlike == f"The steps are not alike: {words}."
        assert str(tl.compare(usual, other, width=200)).endswith(words + ".")
    assert tl.compare(usual, profiled()).unlike is None


def test_steps_of_the_same_kind_are_found_among_others():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with tl.profile(model) as both:
        model.train()(torch.rand(2, 4)).sum().backward()
        model.eval()(torch.rand(2, 4))
    with tl.profile(model) as evaluation:
        model.eval()(torch.rand(2, 4))
    assert tl.compare(both, evaluation).unlike is None
    assert "of evaluation" in str(tl.compare(both, evaluation, width=200))


def test_a_kind_of_steps_is_found_under_another_name():
    """A profile with steps of one kind calls it 'training'; one with two kinds says what tells them
    apart.
    """
    model = nn.Linear(4, 4)

    def profiled(*rows: int, looks: bool = False) -> tl.Profile:
        with tl.profile(model) as p:
            for number in rows:
                model(torch.rand(number, 4))
            if looks:
                with torch.no_grad():
                    model(torch.rand(rows[0], 4))
        return p

    usual, other = profiled(2), profiled(2, 50)
    flops = 2 * 2 * 4 * 4
    changes = tl.compare(usual, other, "flops")
    assert (changes[""].before, changes[""].after, changes.unlike) == (flops, flops, None)
    assert str(changes).startswith(
        "FLOPs of Linear in a step of training, inputs 2x4: 1 step before, 1 after"
    )
    changes = tl.compare(other, usual, "flops", step_kind="training, inputs 2x4")
    assert (changes[""].before, changes[""].after) == (flops, flops)
    looking = tl.compare(usual, profiled(2, looks=True))
    assert "of training, with gradients: 1 step before, 1 after" in str(looking)
    unlike = tl.compare(profiled(3), other).unlike
    assert unlike == "The steps are not alike: inputs 3x4 before, inputs 2x4 and inputs 50x4 after."


def test_a_kind_that_only_one_profile_has_raises():
    model = nn.Linear(4, 4)
    training, evaluation = (
        tl.profile(model.train(), torch.rand(2, 4)),
        tl.profile(model.eval(), torch.rand(2, 4)),
    )
    words = (
        "that both profiles have, got 'training'.* none in common: 'training' before, "
        "'evaluation' after"
    )
    with pytest.raises(ValueError, match=words):
        tl.compare(training, evaluation, step_kind="training")
    with tl.profile(model) as empty:
        pass
    with pytest.raises(ValueError, match="'training' before, none after"):
        tl.compare(training, empty, step_kind="training")
    assert tl.compare(training, empty).unlike is None
