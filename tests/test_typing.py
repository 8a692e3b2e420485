"""A type checker, and so an editor, knows every option and every field."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PROGRAM = """
import json
from collections import UserDict

import torch
import torchlens as tl

m, x = torch.nn.ReLU(), torch.rand(2)
h = tl.log_forward_pass(m, x, vis_outpath="a.gv", vis_fileformat="gv", layers_to_save=["relu", 1])
tl.log_forward_pass(m, x, layers_to_save=lambda entry: entry.layer_type == "relu")
tl.log_forward_pass(m, x, None, "all", True, "cpu")
tl.show_model_graph(m, x, vis_opt="rolled", random_seed=1)
h.render_graph("rolled", 1, "a.gv", vis_direction="topdown")
json.loads(h.to_json())
json.loads(tl.profile(m, x).to_chrome_trace())
tl.log_forward_pass(m, None, UserDict(input=x))
tl.log_forward_pass(m, x, vis_outpth="a.gv")  # wrong
tl.log_forward_pass(m, x, vis_direction="up")  # wrong
tl.show_model_graph(m, x, vis_opt="rold")  # wrong
h.render_graph(vis_fileformat="bmp")  # wrong
h[0].tensor_contnets  # wrong
h.to_json(1)  # wrong
json.loads(h.to_json("a.json"))  # wrong
h.layer_lists  # wrong
h.summary(sort_by="speed")  # wrong
tl.profile(m, check="nan")  # wrong
tl.profile(m, x).summary(sort_by="peak_bytes", by="type", times="p95")
tl.profile(m, x).summary(sort_by="speed")  # wrong
tl.profile(m, x).summary(by="modul")  # wrong
tl.profile(m, x).to_pandas(by="row")  # wrong
tl.profile(m, x).overlay("flop")  # wrong
tl.compare(tl.profile(m, x), tl.profile(m, x), "params")
tl.compare(tl.profile(m, x), tl.profile(m, x), "speed")  # wrong
run = tl.monitor(m, "runs/a", graph="modules", compiled="eager")
tl.monitor(m, "runs/a", graph="none")  # wrong
tl.monitor(m, "runs/a", compiled="both")  # wrong
run.embed("fc", "tsne", basis="fixed")
run.embed("fc", "umap")  # wrong
run.video("fc", "fc.mp4", show="pca", what="gradients")
run.video("fc", "fc.mp4", show="bars")  # wrong
"""


@pytest.mark.slow
def test_a_type_checker_finds_the_wrong_calls_and_no_others(tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    # By name alone: what mypy remembers of an earlier run stands under the folder of that run.
    found = {int(line) for line in re.findall(r"program\.py:(\d+): error", done.stdout)}
    wrong = {
        number
        for number, line in enumerate(PROGRAM.split("\n"), start=1)
        if line.endswith("# wrong")
    }
    assert found == wrong, done.stdout + done.stderr
