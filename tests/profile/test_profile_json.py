"""A profile as nested JSON."""

import json
from pathlib import Path

import pytest

from tests.profile.profile_records import call, made_up, module
from torchlens._profile.exports import to_json

# The fields that readers of the format know.
CLASSIC = {
    "type": str,
    "input_shapes": list,
    "output_shapes": list,
    "grad_in_shape": list,
    "grad_out_shape": list,
    "num_parameters": int,
    "num_learnable_parameters": int,
    "param_memory_usage": int,
    "gradient_memory_usage": int,
    "input_memory_usage": list,
    "output_memory_usage": list,
    "effective_additional_memory_fwd": int,
    "effective_additional_memory_bwd": int,
    "forward_nan": bool,
    "grad_in_nan": bool,
    "grad_out_nan": bool,
    "total_memory": int,
    "forward_latency": float,
    "backward_latency": float,
}


def test_modules_nest_as_the_model_does():
    data = json.loads(to_json(made_up()) or "")
    assert list(data) == ["Net"]
    assert set(data["Net"]) == {"info", "children"}
    assert list(data["Net"]["children"]) == ["stem", "head", "spare"]
    assert list(data["Net"]["children"]["stem"]["children"]) == ["conv", "act"]
    assert data["Net"]["children"]["head"]["children"] == {}


def test_every_module_has_the_classic_fields():
    checked = call(
        2, "", forward_nonfinite=False, grad_in_nonfinite=True, grad_out_nonfinite=False,
        backward_seconds=0.5,
        added_bytes=3, added_bytes_backward=-3, forward_seconds=0.25,
    )  # fmt: skip
    info = json.loads(to_json(made_up(root=module("", "Net", [checked], []))) or "")["Net"]["info"]
    assert {name: type(info[name]) for name in CLASSIC} == CLASSIC
    assert (info["forward_nan"], info["grad_in_nan"]) == (False, True)
    data = json.loads(to_json(made_up()) or "")["Net"]
    for node in (data, *data["children"].values()):
        assert set(CLASSIC) <= set(node["info"])


def test_numbers_are_bytes_and_seconds_of_the_measured_steps():
    data = json.loads(to_json(made_up()) or "")["Net"]
    conv = data["children"]["stem"]["children"]["conv"]["info"]
    assert conv["forward_latency"] == pytest.approx(0.0075)
    assert conv["effective_additional_memory_fwd"] == 30 * 1024
    assert data["children"]["stem"]["children"]["act"]["info"]["num_calls"] == 2
    assert data["info"]["total_memory"] == 164816 + 82856 + 600
    assert data["info"]["units"]["memory"] == "bytes"
    assert (data["info"]["steps"], data["info"]["warmup_steps"]) == (2, 1)


def test_missing_measurements_are_null():
    spare = json.loads(to_json(made_up()) or "")["Net"]["children"]["spare"]["info"]
    assert spare["forward_latency"] is None
    assert spare["forward_nan"] is None
    assert spare["input_shapes"] == []


def test_it_is_written_to_a_file(tmp_path: Path):
    path = tmp_path / "new" / "profile.json"
    assert to_json(made_up(), path, indent=2) is None
    assert json.loads(path.read_text()) == json.loads(to_json(made_up()) or "")


def test_modules_may_be_nested_deeply():
    record = module("x" + ".x" * 200, "Inner", [], [])
    for depth in range(200, 0, -1):
        record = module("x" + ".x" * (depth - 1), "Inner", [], [record])
    data = json.loads(to_json(made_up(root=module("", "Deep", [], [record]))) or "")
    assert list(data["Net"]["children"]) == ["x"]
