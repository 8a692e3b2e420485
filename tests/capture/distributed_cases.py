"""What each of two processes does in `test_distributed.py`: one function per case, the same on
both.

Run as `python distributed_cases.py RANK FOLDER`. Every case has a process group of its own, so that
one that fails leaves the next alone; what came of it is written to a file in the folder.
"""

import contextlib
import copy
import datetime
import json
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.distributed import all_reduce as all_reduce_imported_early
from torch.distributed import distributed_c10d

import torchlens as tl

CASES: dict[str, Callable[[int], None]] = {}
WORLD = 2
# Nothing takes long; a process that waits this long for the other waits in vain.
PATIENCE = datetime.timedelta(seconds=240)


def case(function: Callable[[int], None]) -> Callable[[int], None]:
    CASES[function.__name__] = function
    return function


# -- looking
# --------------------------------------------------------------------------------------------------


class Noting(nn.Module):
    """A model that, run plainly, notes copies of what it computes; logged, it computes the same and
    notes nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.notes: dict[str, torch.Tensor] | None = None

    def note(self, label: str, tensor: torch.Tensor) -> None:
        if self.notes is not None:
            self.notes[label] = tensor.detach().clone()


def gather_into(output: torch.Tensor, tensor: torch.Tensor, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", FutureWarning
        )  # newer versions of torch have another name for it
        return dist.all_gather_into_tensor(output, tensor, **options)


def reduce_scatter_into(output: torch.Tensor, tensor: torch.Tensor, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # likewise
        return dist.reduce_scatter_tensor(output, tensor, **options)


def plain_notes(model: Noting, *args: Any) -> dict[str, torch.Tensor]:
    model.notes = {}
    model(*(arg.clone() for arg in args))
    notes, model.notes = model.notes, None
    return notes


def check(
    model: Noting, x: torch.Tensor, parents: dict[str, list[str]], **options: Any
) -> tl.ModelHistory:
    """Logs and validates; each saved value is what a plain run noted, and parents are those
    given.
    """
    notes = plain_notes(model, x)
    history = tl.log_forward_pass(model, x.clone(), **options)
    for label, value in notes.items():
        saved = history[label].tensor_contents
        assert torch.equal(saved, value), (
            f"{label}: saved {saved.tolist()}, computed {value.tolist()}"
        )
    found = {label: history[label].parent_layers for label in parents}
    assert found == parents, found
    report = tl.validate_forward_pass(model, x.clone())
    assert report.passed, report
    return history


# -- collectives that write in place
# -----------------------------------------------------------------------------------


class Reduced(Noting):
    def __init__(self, reduce: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.reduce = reduce

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 3
        self.note("mul_1_1", y)
        self.reduce(y)
        self.note(self.label, y)
        return y + 1

    label = "allreduce_1_2"


@case
def all_reduce_is_an_entry_and_what_was_before_stays(rank: int) -> None:
    x = torch.full((2, 2), rank + 1.0)
    for reduce in (dist.all_reduce, all_reduce_imported_early, distributed_c10d.all_reduce):
        history = check(
            Reduced(reduce),
            x,
            {"allreduce_1_2": ["mul_1_1"], "add_1_3": ["allreduce_1_2"], "output_1_4": ["add_1_3"]},
        )
        assert history["mul_1_1"].tensor_contents.tolist() == [[3.0 * (rank + 1)] * 2] * 2
        assert history["allreduce_1_2"].tensor_contents.tolist() == [[9.0, 9.0]] * 2
        entry = history["allreduce_1_2"]
        assert entry.func_applied is dist.all_reduce
        assert entry.func_applied_name == "all_reduce"
        assert entry.function_is_inplace
        assert entry.func_keyword_args_non_tensor == {"op": "SUM", "group": "ranks 0, 1"}
        assert entry.flops == 0
        assert Path(entry.func_call_stack[0].file).name == Path(__file__).name


@case
def broadcast_and_reduce(rank: int) -> None:
    x = torch.full((2, 2), rank + 1.0)
    for src in (0, 1):

        def broadcast(y: torch.Tensor, src: int = src) -> None:
            dist.broadcast(y, src)

        def reduce(y: torch.Tensor, dst: int = src) -> None:
            dist.reduce(y, dst, op=dist.ReduceOp.MAX)

        model = Reduced(broadcast)
        model.label = "broadcast_1_2"
        history = check(model, x, {"broadcast_1_2": ["mul_1_1"], "add_1_3": ["broadcast_1_2"]})
        assert history["broadcast_1_2"].tensor_contents.tolist() == [[3.0 * (src + 1)] * 2] * 2
        assert history["broadcast_1_2"].func_keyword_args_non_tensor == {
            "group_src": src,
            "group": "ranks 0, 1",
        }
        model = Reduced(reduce)
        model.label = "reduce_1_2"
        history = check(model, x, {"reduce_1_2": ["mul_1_1"], "add_1_3": ["reduce_1_2"]})
        expected = {"op": "MAX", "group_dst": src, "group": "ranks 0, 1"}
        assert history["reduce_1_2"].func_keyword_args_non_tensor == expected


@case
def all_reduce_of_a_part_a_view_and_a_complex_tensor(rank: int) -> None:
    class Part(Noting):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 3
            first = y[0]
            dist.all_reduce(first)
            self.note("allreduce_1_3", first)
            z = y * 2
            self.note("mul_2_4", z)
            c = torch.complex(z, z)
            dist.all_reduce(c)
            return c.real + 1

    x = torch.full((2, 2), rank + 1.0)
    check(
        Part(),
        x,
        {
            "getitem_1_2": ["mul_1_1"],
            "allreduce_1_3": ["getitem_1_2"],
            "mul_2_4": ["mul_1_1", "allreduce_1_3"],
            "viewasreal_1_6": ["complex_1_5"],
            "allreduce_2_7": ["viewasreal_1_6"],
            "real_1_8": ["allreduce_2_7"],
        },
    )


# -- collectives that fill other tensors
# -------------------------------------------------------------------------------


@case
def all_gather_into_lists_views_and_one_tensor(rank: int) -> None:
    class Gathered(Noting):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 3
            parts = [torch.empty_like(y) for _ in range(WORLD)]
            dist.all_gather(parts, y)
            self.note("allgather_1_4", parts[0])
            self.note("allgather_2_5", parts[1])
            both = torch.cat(parts)
            whole = torch.empty(4, 2)
            gather_into(whole, y)
            self.note("allgatherintotensor_1_7", whole)
            pieces = torch.zeros(4, 2)
            dist.all_gather(list(pieces.chunk(2)), y)
            total = both + whole
            self.note("add_1_10", total)
            total = total + pieces
            self.note("add_2_11", total)
            return total

    x = torch.full((2, 2), rank + 1.0)
    history = check(
        Gathered(),
        x,
        {
            "allgather_1_4": ["mul_1_1"],
            "allgather_2_5": ["mul_1_1"],
            "cat_1_6": ["allgather_1_4", "allgather_2_5"],
            "allgatherintotensor_1_7": ["mul_1_1"],
            "add_1_10": ["cat_1_6", "allgatherintotensor_1_7"],
            "add_2_11": ["add_1_10", "allgather_3_8", "allgather_4_9"],
        },
    )
    stack = history["allgatherintotensor_1_7"].func_call_stack
    assert Path(stack[0].file).name == Path(__file__).name
    assert history["allgather_2_5"].iterable_output_index == 1
    assert not history["allgather_2_5"].function_is_inplace
    assert history["allgather_1_4"].tensor_contents.tolist() == [[3.0, 3.0]] * 2
    assert history["allgather_2_5"].tensor_contents.tolist() == [[6.0, 6.0]] * 2


@case
def gather_and_scatter(rank: int) -> None:
    class There(Noting):
        def __init__(self, root: int) -> None:
            super().__init__()
            self.root = root

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 3
            parts = [torch.empty_like(y) for _ in range(WORLD)] if rank == self.root else None
            dist.gather(y, parts, dst=self.root)
            pieces = None if parts is None else [part + 1 for part in parts]
            mine = torch.empty_like(y)
            dist.scatter(mine, pieces, src=self.root)
            self.note("scatter_1", mine)
            return mine * 2 + y

    x = torch.full((2, 2), rank + 1.0)
    for root in range(WORLD):
        history = check(There(root), x, {})
        gathered, scattered = (
            [entry for entry in history if entry.layer_type == "gather"],
            history["scatter_1"],
        )
        labels = [entry.layer_label for entry in gathered]
        assert [entry.parent_layers for entry in gathered] == [["mul_1_1"]] * (
            WORLD if rank == root else 1
        )
        assert history["mul_2"].parent_layers == [scattered.layer_label]
        added = [entry for entry in history if entry.layer_type == "add"]
        if rank == root:
            assert [entry.tensor_contents[0, 0].item() for entry in gathered] == [3.0, 6.0]
            assert [entry.parent_layers for entry in added[:2]] == [[label] for label in labels]
            assert scattered.parent_layers == [entry.layer_label for entry in added[:2]]
        else:
            assert torch.equal(gathered[0].tensor_contents, x * 3)
            assert gathered[0].child_layers == []
            assert scattered.parent_layers == []
        assert added[-1].parent_layers == [history["mul_2"].layer_label, "mul_1_1"]


@case
def reduce_scatter_and_all_to_all(rank: int) -> None:
    class Exchanged(Noting):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 3
            out = torch.empty(1, 2)
            dist.reduce_scatter(out, list(y.split(1)))
            self.note("reducescatter_1", out)
            whole = torch.empty(1, 2)
            reduce_scatter_into(whole, y)
            self.note("reducescattertensor_1", whole)
            single = torch.empty(3 if rank == 0 else 1, 2)
            send, receive = ([1, 1], [1, 2]) if rank == 0 else ([2, 0], [1, 0])
            dist.all_to_all_single(single, y, receive, send)
            self.note("alltoallsingle_1", single)
            parts = [torch.empty(1, 2) for _ in range(WORLD)]
            dist.all_to_all(parts, list(y.split(1)))
            self.note("alltoall_1", parts[0])
            self.note("alltoall_2", parts[1])
            return torch.cat([out, whole, single, *parts])

    x = torch.arange(4.0).reshape(2, 2) + 10 * rank
    history = check(
        Exchanged(), x, {"reducescattertensor_1": ["mul_1_1"], "alltoallsingle_1": ["mul_1_1"]}
    )
    labels = {
        name: history[name].layer_label for name in ("split_1", "split_2", "split_3", "split_4")
    }
    assert history["reducescatter_1"].parent_layers == [labels["split_1"], labels["split_2"]]
    assert history["alltoall_2"].parent_layers == [labels["split_3"], labels["split_4"]]
    results = (
        "reducescatter_1",
        "reducescattertensor_1",
        "alltoallsingle_1",
        "alltoall_1",
        "alltoall_2",
    )
    assert history["cat_1"].parent_layers == [history[name].layer_label for name in results]
    sizes = history["alltoallsingle_1"].func_keyword_args_non_tensor
    assert sizes["input_split_sizes"] == ([1, 1] if rank == 0 else [2, 0])


@case
def sending_and_receiving(rank: int) -> None:
    class Passed(Noting):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 3
            other = 1 - rank
            got = torch.empty_like(y)
            if rank == 0:
                dist.send(y, other)
                dist.recv(got, other)
            else:
                dist.recv(got)
                dist.send(y, other)
            self.note("recv_1", got)
            again = torch.empty_like(y)
            works = [dist.isend(got, other), dist.irecv(again, other)]
            for work in works:
                work.wait()
            self.note("irecv_1", again)
            last = torch.empty_like(y)
            operations = [dist.P2POp(dist.irecv, last, other), dist.P2POp(dist.isend, y, other)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            self.note("irecv_2", last)
            return y + got + again + last

    x = torch.full((2, 2), rank + 1.0)
    received: dict[str, list[str]] = {"recv_1": [], "irecv_1": [], "irecv_2": []}
    history = check(Passed(), x, {"send_1": ["mul_1_1"], "isend_2": ["mul_1_1"], **received})
    assert history["isend_1"].parent_layers == [history["recv_1"].layer_label]
    assert history["send_1"].child_layers == []
    assert torch.equal(history["send_1"].tensor_contents, x * 3)
    assert history["add_1"].parent_layers == ["mul_1_1", history["recv_1"].layer_label]
    assert history["add_2"].parent_layers[1] == history["irecv_1"].layer_label
    assert history["add_3"].parent_layers[1] == history["irecv_2"].layer_label


# -- results that come later
# -------------------------------------------------------------------------------------------


class Overlapped(Noting):
    """Computes something else while the others are heard from; `wait` says how it waits for
    them.
    """

    def __init__(self, wait: Callable[[Any], Any], *, writes: bool = False) -> None:
        super().__init__()
        self.wait = wait
        self.writes = writes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 3
        self.note("mul_1", y)
        whole = torch.empty(4, 2)
        first = dist.all_reduce(y, async_op=True)
        second = gather_into(whole, x, async_op=True)
        z = x * 5
        self.note("mul_2", z)
        self.wait(first)
        self.wait(second)
        self.note("allreduce_1", y)
        self.note("allgatherintotensor_1", whole)
        if self.writes:
            y.add_(1)
            whole.mul_(0)
        return torch.cat([y + z, whole])


@case
def the_value_is_what_was_there_after_waiting(rank: int) -> None:
    x = torch.full((2, 2), rank + 1.0)
    for wait in (lambda work: work.wait(), lambda work: work.get_future().wait()):
        for writes in (False, True):
            history = check(
                Overlapped(wait, writes=writes),
                x,
                {"allreduce_1": ["mul_1_1"], "mul_1": ["input_1_0"]},
            )
            assert history["allgatherintotensor_1"].parent_layers == ["input_1_0"]
            sums = tl.log_forward_pass(
                Overlapped(wait, writes=writes), x, activation_postfunc=torch.sum
            )
            assert sums["allreduce_1"].tensor_contents == 36.0
            assert sums["allgatherintotensor_1"].tensor_contents == 12.0
            some = tl.log_forward_pass(
                Overlapped(wait, writes=writes), x, layers_to_save=["allreduce_1", "mul_1"]
            )
            assert some["allreduce_1"].tensor_contents.tolist() == [[9.0, 9.0]] * 2
            assert some["mul_1"].tensor_contents.tolist() == [[3.0 * (rank + 1)] * 2] * 2
            assert some["allgatherintotensor_1"].tensor_contents is None


@case
def what_nobody_waited_for_has_no_value(rank: int) -> None:
    class Impatient(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 3
            got = torch.zeros_like(y)
            self.work = dist.irecv(got, 1 - rank)
            self.got = got
            return y + 1

    model = Impatient()
    x = torch.full((2, 2), rank + 1.0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        history = tl.log_forward_pass(model, x)
    assert [str(warning.message) for warning in told] == [
        (
            "torchlens: irecv was begun but not waited for before the forward pass ended: its "
            "result has no saved value."
        )
    ]
    dist.barrier()
    sending = dist.isend(x, 1 - rank)
    model.work.wait()
    sending.wait()
    assert model.got[0, 0] == 2.0 - rank
    assert history["irecv_1"].tensor_contents is None
    assert not history["irecv_1"].has_saved_activations
    assert history["zeroslike_1"].tensor_contents.tolist() == [[0.0, 0.0]] * 2
    assert history["mul_1"].tensor_contents.tolist() == (x * 3).tolist()


@case
def collectives_in_one_go(rank: int) -> None:
    class Together(Noting):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, z = x * 3, x * 5
            with distributed_c10d._coalescing_manager():
                dist.all_reduce(y)
                dist.all_reduce(z)
            self.note("allreducecoalesced_1", y)
            self.note("allreducecoalesced_2", z)
            return y + z

    x = torch.full((2, 2), rank + 1.0)
    history = check(
        Together(), x, {"allreducecoalesced_1": ["mul_1_1"], "allreducecoalesced_2": ["mul_2_2"]}
    )
    assert history["add_1"].parent_layers == ["allreducecoalesced_1_3", "allreducecoalesced_2_4"]


@case
def objects_and_barriers_leave_no_trace(rank: int) -> None:
    class Talks(Noting):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 3
            dist.barrier()
            told: list[Any] = [None] * WORLD
            dist.all_gather_object(told, {"rank": rank})
            assert told == [{"rank": 0}, {"rank": 1}]
            said = ["from 0" if rank == 0 else None]
            dist.broadcast_object_list(said, src=0)
            assert said == ["from 0"]
            dist.monitored_barrier()
            return y + told[1]["rank"]

    x = torch.full((2, 2), rank + 1.0)
    history = check(
        Talks(), x, {"mul_1_1": ["input_1_0"], "add_1_2": ["mul_1_1"], "output_1_3": ["add_1_2"]}
    )
    assert len(history) == 4


@case
def tensors_inside_objects(rank: int) -> None:
    class Talks(Noting):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 3
            told: list[Any] = [None] * WORLD
            dist.all_gather_object(told, {"y": y})
            z = told[1 - rank]["y"]
            self.note("tensortoobject_2" if rank == 0 else "tensortoobject_1", z)
            return y + z

    x = torch.full((2, 2), rank + 1.0)
    history = check(Talks(), x, {})
    other = history["tensortoobject_2" if rank == 0 else "tensortoobject_1"]
    assert history["add_1"].parent_layers == ["mul_1_1", other.layer_label]
    assert {"mul_1_1", history["objecttotensor_1"].layer_label} <= ancestors(
        history, other.layer_label
    )


@case
def a_group_of_its_own(rank: int) -> None:
    alone = [dist.new_group([each]) for each in range(WORLD)]
    both = dist.new_group([0, 1], group_desc="both")

    class Grouped(Noting):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 3
            dist.all_reduce(y, group=alone[rank])
            self.note("allreduce_1", y)
            dist.all_reduce(y, group=both)
            self.note("allreduce_2", y)
            return y + 1

    x = torch.full((2, 2), rank + 1.0)
    history = check(
        Grouped(), x, {"allreduce_1_2": ["mul_1_1"], "allreduce_2_3": ["allreduce_1_2"]}
    )
    assert history["allreduce_1"].func_keyword_args_non_tensor["group"] == f"ranks {rank}"
    assert history["allreduce_2"].func_keyword_args_non_tensor["group"] == "ranks 0, 1"
    assert history["allreduce_1"].tensor_contents[0, 0] == 3.0 * (rank + 1)


@case
def a_stage_of_a_pipeline(rank: int) -> None:
    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor | None = None) -> torch.Tensor | None:
            if x is None:
                x = torch.empty(1, 2)
                dist.recv(x, 0)
                return self.fc(x) * 2
            dist.send(self.fc(x).detach(), 1)
            return None

    model = Stage()
    x = torch.ones(1, 2)
    history = tl.log_forward_pass(model, [x] if rank == 0 else [])
    if rank == 0:
        assert [entry.layer_label for entry in history] == [
            "input_1_0",
            "linear_1_1",
            "detach_1_2",
            "send_1_3",
        ]
        assert torch.equal(history["send_1"].tensor_contents, model.fc(x))
    else:
        assert [entry.layer_type for entry in history] == ["recv", "linear", "mul", "output"]
        assert history["linear_1"].parent_layers == ["recv_1_1"]
        assert torch.equal(
            history["recv_1"].tensor_contents, model.fc(x)
        )  # the same parameters in both processes


# -- with gradients
# --------------------------------------------------------------------------------------------------


@case
def collectives_that_autograd_knows(rank: int) -> None:
    import torch.distributed.nn.functional as F_dist

    world = dist.group.WORLD
    warnings.simplefilter(
        "ignore", FutureWarning
    )  # newer versions of torch would have the functional collectives used

    class Differentiable(Noting):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.fc(x)
            summed = F_dist.all_reduce(y, group=world)
            self.note("allreduce_1", summed)
            parts = F_dist.all_gather(y, world)
            self.note("allgather_1", parts[0])
            self.note("allgather_2", parts[1])
            swapped = F_dist.all_to_all_single(torch.empty_like(y), y, group=world)
            self.note("alltoallsingle_1", swapped)
            shared = F_dist.broadcast(y, 1, world)
            self.note("broadcast_1", shared)
            reduced = F_dist.reduce_scatter(torch.empty(1, 2), list(y.split(1)), group=world)
            self.note("reducescatter_1", reduced)
            return torch.cat([summed, *parts, swapped, shared, reduced])

    model = Differentiable()
    x = torch.arange(4.0).reshape(2, 2) + rank
    history = check(model, x, {}, save_gradients=True)
    names = (
        "allreduce_1",
        "allgather_1",
        "allgather_2",
        "alltoallsingle_1",
        "broadcast_1",
        "reducescatter_1",
    )
    for name in names:
        assert history[name].layer_label in ancestors(history, "cat_1"), name
        assert "linear_1_1" in ancestors(history, name), name
    for name in ("allreduce_1", "allgather_1", "allgather_2", "broadcast_1"):
        assert history[name].gradfunc is not None, name
    model.zero_grad()
    output = model(x)
    output.sum().backward()
    expected = model.fc.weight.grad.clone()
    model.zero_grad()
    history = tl.log_forward_pass(model, x, save_gradients=True)
    history["output_1"].tensor_contents.sum().backward()
    assert torch.equal(history.param_grads["fc.weight"], expected)
    assert history["allreduce_1"].grad_contents.tolist() == [[1.0, 1.0]] * 2


def ancestors(history: tl.ModelHistory, label: str) -> set[str]:
    found: set[str] = set()
    pending = list(history[label].parent_layers)
    while pending:
        parent = pending.pop()
        if parent not in found:
            found.add(parent)
            pending += history[parent].parent_layers
    return found


# -- functional collectives and DTensor
# --------------------------------------------------------------------------------


@case
def functional_collectives(rank: int) -> None:
    import torch.distributed._functional_collectives as funcol

    warnings.simplefilter(
        "ignore", FutureWarning
    )  # newer versions of torch have other names for some

    class Functional(Noting):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 3
            group: Any = dist.group.WORLD
            summed = funcol.all_reduce(y, "sum", group)
            whole = funcol.all_gather_tensor(y, 0, group)
            z = summed + 1
            self.note("allreduce_1", summed)
            self.note("add_1", z)
            waited = funcol.wait_tensor(whole)
            self.note("allgatherintotensor_1", waited)
            return torch.cat([z, waited])

    x = torch.full((2, 2), rank + 1.0)
    history = check(
        Functional(), x, {"allreduce_1": ["mul_1_1"], "allgatherintotensor_1": ["mul_1_1"]}
    )
    assert history["add_1"].parent_layers == [history["allreduce_1"].layer_label]
    assert history["waittensor_1"].parent_layers == [history["allgatherintotensor_1"].layer_label]
    assert history["cat_1"].parent_layers == [
        history["add_1"].layer_label,
        history["waittensor_1"].layer_label,
    ]
    assert history["mul_1"].tensor_contents.tolist() == (x * 3).tolist()
    sums = tl.log_forward_pass(Functional(), x, activation_postfunc=torch.sum)
    assert sums["allreduce_1"].tensor_contents == 36.0
    assert sums["allgatherintotensor_1"].tensor_contents == 36.0


class Spread(nn.Module):
    """Multiplies with a parameter that is spread over the processes."""

    def __init__(self, mesh: Any) -> None:
        from torch.distributed.tensor import Shard, distribute_tensor

        super().__init__()
        self.mesh = mesh
        self.weight = nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        spread = DTensor.from_local(x, self.mesh, [Shard(0)])
        product: Any = nn.functional.relu(spread @ self.weight)
        whole = product.redistribute(self.mesh, [Replicate()])
        whole.add_(1)
        return whole.full_tensor().sum() + product.to_local().sum(), product


@case
def dtensors_have_values_neighbours_and_gradients(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    model = Spread(init_device_mesh("cpu", (WORLD,)))
    x = torch.arange(8.0).reshape(2, 4) + 10 * rank
    total, expected = model(x)
    total.backward()
    gradient, model.weight.grad = model.weight.grad, None
    history = tl.log_forward_pass(model, x, save_gradients=True)
    product = history["matmul_1"]
    assert isinstance(product.tensor_contents, DTensor)
    assert product.tensor_shape == (4, 4)
    assert product.parent_layers == ["fromtorchtensor_1_2"]
    assert product.parent_param_addresses == ["weight"]
    assert product.num_params_total == 16
    relu = history["relu_1"]
    assert torch.equal(relu.tensor_contents.to_local(), expected.to_local())
    assert history["output_2"].parent_layers == [relu.layer_label]
    assert relu.tensor_contents.placements == expected.placements
    gathered = next(
        entry
        for entry in history
        if entry.layer_type.startswith(("allgather", "allreduce", "reducescatter"))
    )
    assert {relu.layer_label, "input_1_0"} <= ancestors(history, gathered.layer_label)
    added = history["add_1"]
    assert gathered.layer_label in ancestors(history, added.layer_label)
    before = history[added.parent_layers[0]].tensor_contents.to_local()
    assert torch.equal(added.tensor_contents.to_local(), before + 1)
    assert {"input_1_0", relu.layer_label, added.layer_label} <= ancestors(history, "output_1")
    # Looking must not ask the other process, which has no reason to answer.
    if rank == 0:
        folder = Path(sys.argv[2])
        for entry in history:
            assert str(entry)
        assert "DTensor" in str(relu)
        assert "on this rank" in str(relu)
        assert str(history)
        assert history.summary() is not None
        assert history.to_json()
        assert len(history.to_pandas()) == len(history)
        assert history.first_nonfinite() is None
        history.explore(folder / "spread.html")
        assert history.total_flops > 0
    history["output_1"].tensor_contents.sum().backward()
    found: Any = history.param_grads["weight"]
    assert torch.equal(found.to_local(), gradient.to_local())
    if rank == 1:
        assert relu.grad_contents is not None
        assert "Gradient" in str(relu)
    report = tl.validate_forward_pass(model, x)
    assert report.passed, report
    assert report.num_checked["replay"] > 4, report


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            f(x).view(batch, length, -1, 4).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attention, self.mlp = Attention(), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@case
def tensor_parallel_mlp(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plain = MLP()
    x = torch.randn(2, 8)
    expected = tl.log_forward_pass(plain, x)
    model = parallelize_module(
        copy.deepcopy(plain),
        init_device_mesh("cpu", (WORLD,)),
        {"up": ColwiseParallel(), "down": RowwiseParallel()},
    )
    history = tl.log_forward_pass(model, x, save_gradients=True)
    assert [entry.parent_param_addresses for entry in history if entry.computed_with_params] == [
        ["up.weight", "up.bias"],
        ["down.weight", "down.bias"],
    ]
    assert [entry.num_params_total for entry in history if entry.computed_with_params] == [144, 136]
    # A product of half the width may round otherwise than the whole one's half: which kernels run
    # is up to the processor.
    torch.testing.assert_close(
        history["linear_1"].tensor_contents.to_local(),
        expected["linear_1"].tensor_contents.chunk(2, 1)[rank],
    )
    reduced = history["allreduce_1"]
    assert reduced.parent_layers == [history["linear_2"].layer_label]
    torch.testing.assert_close(reduced.tensor_contents, expected["linear_2"].tensor_contents)
    part = history["linear_2"].tensor_contents  # still to be summed up over the processes
    assert part.placements[0].is_partial()
    assert torch.equal(part.to_local(), model.down(torch.relu(model.up(x)))) is False
    assert reduced.layer_label in ancestors(history, "output_1")
    history["output_1"].tensor_contents.sum().backward()
    plain(x).sum().backward()
    for name, parameter in plain.named_parameters():
        gradient: Any = history.param_grads[name]
        torch.testing.assert_close(gradient.full_tensor(), parameter.grad)
    report = tl.validate_forward_pass(model, x)
    assert report.passed, report


@case
def sequence_parallel_transformer(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (WORLD,))
    plain = Language()
    model = copy.deepcopy(plain)
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "norm1": SequenceParallel(), "attention": whole,
                "attention.query": ColwiseParallel(),
                "attention.key": ColwiseParallel(), "attention.value": ColwiseParallel(),
                "attention.out": RowwiseParallel(output_layouts=Shard(1)),
                "norm2": SequenceParallel(), "mlp": whole,
                "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )  # fmt: skip
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    tokens = torch.arange(8).reshape(1, 8)
    history = tl.log_forward_pass(model, tokens)
    torch.testing.assert_close(history["output_1"].tensor_contents, plain(tokens))
    expected = tl.log_forward_pass(plain, tokens)
    params = [entry.parent_param_addresses for entry in expected if entry.computed_with_params]
    assert [
        entry.parent_param_addresses for entry in history if entry.computed_with_params
    ] == params
    above = ancestors(history, "output_1")
    assert "input_1_0" in above
    collectives = [
        entry.layer_label
        for entry in history
        if entry.layer_type.startswith(("allgather", "reducescatter"))
    ]
    assert len(collectives) >= 10
    assert above.issuperset(collectives)
    assert all(history[label].parent_layers for label in collectives)
    report = tl.validate_forward_pass(model, tokens)
    assert report.passed, report
    assert report.num_checked["replay"] > 80, report


# -- parameters in pieces, and copies of a model
# -----------------------------------------------------------------------


@case
def fully_sharded_layers_have_their_parameters_and_gradients(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    plain = Language()
    model = copy.deepcopy(plain)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    tokens = torch.arange(8).reshape(1, 8) + rank
    warnings.filterwarnings(
        "ignore", "FSDP2-wrapped module", UserWarning
    )  # what it returns is a view, as `nn.Linear` does
    expected = tl.log_forward_pass(plain, tokens, save_gradients=True)
    for step in range(3):  # the whole parameters are made in the first pass, and used again
        with_grads = tl.log_forward_pass(model, tokens, save_gradients=True)
        later = tl.log_forward_pass(model, tokens) if step == 2 else None
        for entry, other in zip(with_grads, expected, strict=True):
            assert entry.layer_label == other.layer_label
            assert entry.parent_layers == other.parent_layers
            assert entry.parent_param_addresses == other.parent_param_addresses
            assert entry.num_params_total == other.num_params_total
            assert entry.parent_param_shapes == other.parent_param_shapes
            assert torch.equal(entry.tensor_contents, other.tensor_contents), entry.layer_label
        assert with_grads.total_params == expected.total_params
        assert [type(parameter) for parameter in with_grads["linear_1"].parent_params] == [
            type(parameter) for parameter in model.blocks[0].attention.query.parameters()
        ]
        if step == 1:
            continue  # twice in a row without a backward pass
        history = with_grads if later is None else later
        loss = history["output_1"].tensor_contents.square().sum()
        loss.backward() if later is None else history.log_backward(loss)
        plain.zero_grad()
        plain(tokens).square().sum().backward()
        gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
        assert history.param_grads.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(history.param_grads[name], gradient)
        for entry in history:
            if entry.computed_with_params:
                own = [gradients[name] for name in entry.parent_param_addresses]
                torch.testing.assert_close(entry.parent_param_grads, own)
        assert all(
            entry.grad_contents is not None for entry in history if entry.gradfunc is not None
        )
    report = tl.validate_forward_pass(model, tokens)
    assert report.passed, report
    assert report.num_checked["replay"] > 30, report


@case
def profiles_of_sharded_models_find_nothing_wrong_and_leave_training_as_it_is(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
    tokens = torch.arange(8).reshape(1, 8) + rank

    def trained(options: dict[str, Any] | None) -> tuple[list[float], Any]:
        torch.manual_seed(0)
        model = Language()
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        with contextlib.nullcontext() if options is None else tl.profile(model, **options) as p:
            for _ in range(3):
                loss = model(tokens).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return losses, p

    plain, _ = trained(None)
    for check in (None, "nonfinite", "health"):
        for level in ("module", "operation"):
            losses, p = trained({"check": check, "level": level})
            assert losses == plain, (check, level)
            assert not p.findings(), (check, level, p.findings())
            assert not p.problems, (check, level, p.problems)
            assert p.first_nonfinite is None
            assert all(record.num_gradients for record in p.parameters), (check, level)
            assert [step.num_backward_passes for step in p.steps] == [1, 1, 1]
            assert str(p)


@case
def what_looks_at_a_parameter_outlives_its_memory(rank: int) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.t()

    model = nn.Sequential(Turned(), Turned())
    kept = [layer.weight.detach().clone() for layer in model]
    for layer in (*model, model):
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    x = torch.randn(2, 4)
    for options in ({}, {"save_function_args": True}, {"layers_to_save": ["t_1", "t_2"]}):
        history = tl.log_forward_pass(model, x, **options)
        for number, weight in enumerate(kept, start=1):
            turned = history[f"t_{number}"]
            assert torch.equal(turned.tensor_contents, weight.bfloat16().t())
            assert turned.parent_param_addresses == [f"{number - 1}.weight"]
            if "save_function_args" in options:
                assert torch.equal(turned.creation_args[0], weight.bfloat16())
    assert history["to_1"].parent_layers == ["input_1_0"]
    report = tl.validate_forward_pass(model, x)
    assert report.passed, report


@case
def the_older_fsdp(rank: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    warnings.simplefilter("ignore", FutureWarning)
    plain = nn.Sequential(MLP(), MLP(), nn.Linear(8, 3))
    x = torch.randn(2, 8) + rank
    expected = tl.log_forward_pass(plain, x, save_gradients=True)
    expected["output_1"].tensor_contents.sum().backward()
    for keeps_originals in (True, False):
        options: dict[str, Any] = {
            "use_orig_params": keeps_originals,
            "device_id": torch.device("cpu"),
        }
        layers = copy.deepcopy(plain)
        layers.zero_grad()
        for number in (0, 1):
            layers[number] = FullyShardedDataParallel(layers[number], **options)
        model = FullyShardedDataParallel(layers, **options)
        for _ in range(2):
            history = tl.log_forward_pass(model, x, save_gradients=True)
            for entry, other in zip(history, expected, strict=True):
                assert entry.layer_label == other.layer_label
                assert entry.parent_layers == other.parent_layers
                assert torch.equal(entry.tensor_contents, other.tensor_contents)
                names = [
                    name.replace("_fsdp_wrapped_module.", "")
                    for name in entry.parent_param_addresses
                ]
                assert not keeps_originals or names == other.parent_param_addresses
                assert entry.computed_with_params == other.computed_with_params
            history["output_1"].tensor_contents.sum().backward()
            found = {
                name.replace("_fsdp_wrapped_module.", ""): grad
                for name, grad in history.param_grads.items()
            }
            if keeps_originals:
                for name, gradient in expected.param_grads.items():
                    torch.testing.assert_close(found[name], gradient)
            else:
                parts = [
                    gradient.flatten()
                    for name, gradient in expected.param_grads.items()
                    if name.startswith("0.")
                ]
                torch.testing.assert_close(found["0._flat_param"], torch.cat(parts))
        some = tl.log_forward_pass(
            model, x, layers_to_save=["linear_2", "relu_1"], save_function_args=True
        )
        assert torch.equal(some["linear_2"].tensor_contents, expected["linear_2"].tensor_contents)
        assert torch.equal(some["linear_2"].creation_args[1], plain.get_parameter("0.down.weight"))
        report = tl.validate_forward_pass(model, x)
        assert report.passed, report


@case
def distributed_data_parallel_with_batch_norm(rank: int) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)
            self.norm = nn.BatchNorm2d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.norm(self.conv(x)))

    warnings.simplefilter(
        "ignore", FutureWarning
    )  # `broadcast_buffers` has another name in newer versions of torch
    model = nn.parallel.DistributedDataParallel(Normed())
    with torch.no_grad():
        model.module.norm.running_mean.fill_(rank)
    x = torch.randn(2, 3, 6, 6)
    history = tl.log_forward_pass(model, x, save_gradients=True)
    # Rank 0 has its buffers brought to the others before each pass.
    assert history["module.norm.running_mean"].tensor_contents.tolist() == [rank] * 4
    assert history["broadcast_1"].parent_layers == ["buffer_1_0"]
    assert history["broadcast_1"].tensor_contents.tolist() == [0.0] * 4
    assert history["batchnorm_1"].parent_layers == ["conv2d_1_3", "broadcast_1_1", "broadcast_2_2"]
    history["output_1"].tensor_contents.sum().backward()
    assert list(history.param_grads) == [name for name, _ in model.named_parameters()]
    for model_of_the_kind in (
        model,
        nn.parallel.DistributedDataParallel(Normed(), find_unused_parameters=True),
        nn.parallel.DistributedDataParallel(Normed(), broadcast_buffers=False),
        nn.parallel.DistributedDataParallel(Normed().eval()),
    ):
        report = tl.validate_forward_pass(model_of_the_kind, x)
        assert report.passed, report
    with model.no_sync():
        assert "batchnorm_1" in tl.log_forward_pass(model, x)["relu_1"].parent_layers[0]


@case
def uneven_inputs(rank: int) -> None:
    from torch.distributed.algorithms.join import Join

    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    num_entries = []
    with Join([model]):
        for _ in range(1 + rank):
            history = tl.log_forward_pass(model, torch.ones(1, 2))
            history["output_1"].tensor_contents.sum().backward()
            num_entries.append(len(history))
    assert num_entries == [3] * (1 + rank)


# -- what the log leaves behind
# ----------------------------------------------------------------------------------------


@case
def torch_is_as_it_was_and_other_threads_are_not_heard(rank: int) -> None:
    c10d = torch._C._distributed_c10d
    owners = (c10d.ProcessGroup, c10d.Backend, c10d.Work, distributed_c10d, dist)
    other = dist.new_group([0, 1])
    before = [
        {name: id(value) for name, value in vars(owner).items() if callable(value)}
        for owner in owners
    ]

    asked, answered = threading.Event(), threading.Event()
    elsewhere = torch.full((2,), 1.0)

    def reduce_elsewhere() -> None:
        asked.wait()
        dist.all_reduce(elsewhere, group=other)
        answered.set()

    started_before = threading.Thread(target=reduce_elsewhere)
    started_before.start()

    class Both(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 3
            asked.set()
            answered.wait()
            started_here = threading.Thread(target=dist.all_reduce, args=(y,))
            started_here.start()
            started_here.join()
            return y + 1

    history = tl.log_forward_pass(Both(), torch.ones(2))
    started_before.join()
    assert elsewhere.tolist() == [2.0, 2.0]
    assert [entry.layer_type for entry in history] == ["input", "mul", "allreduce", "add", "output"]
    assert history["allreduce_1"].tensor_contents.tolist() == [6.0, 6.0]
    assert history["mul_1"].tensor_contents.tolist() == [3.0, 3.0]

    # A group of its own: gloo's barrier waits for what its group still runs, and would raise this
    # failure once more.
    of_its_own = dist.new_group()

    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(x, op=dist.ReduceOp.BXOR, group=of_its_own)  # not for floating point
            return x

    caught: Any = None
    try:
        tl.log_forward_pass(Broken(), torch.ones(2))
    except RuntimeError as error:
        caught = error
    assert "by the operation all_reduce" in caught.__notes__[0]
    assert [entry.has_saved_activations for entry in caught.partial_history] == [
        True,
        False,
    ]  # it was begun
    assert [
        {name: id(value) for name, value in vars(owner).items() if callable(value)}
        for owner in owners
    ] == before


@case
def nothing_is_patched_without_a_process_group(rank: int) -> None:
    original = vars(torch._C._distributed_c10d.ProcessGroup)["allreduce"]
    is_patched = []

    class Looking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            is_patched.append(
                vars(torch._C._distributed_c10d.ProcessGroup)["allreduce"] is not original
            )
            return x + 1

    tl.log_forward_pass(Looking(), torch.ones(2))
    dist.barrier()
    dist.destroy_process_group()
    tl.log_forward_pass(Looking(), torch.ones(2))
    assert is_patched == [True, False]
    store = FileStore(str(Path(sys.argv[2]) / "store_again"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=PATIENCE)


def main(rank: int, folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    results: dict[str, str] = {}
    for name in names or CASES:
        torch.manual_seed(0)
        warnings.simplefilter("error")
        store = FileStore(str(folder / f"store_{name}"), WORLD)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=PATIENCE)
        try:
            CASES[name](rank)
            dist.barrier()
            results[name] = "passed"
        except Exception:
            results[name] = traceback.format_exc()
        finally:
            dist.destroy_process_group()
        (folder / f"results_{rank}.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
