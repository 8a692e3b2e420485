"""Random mistakes in the logs of ordinary models: validation finds every one."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.networks import Model
from tests.validate.proof import Proof
from torchlens._recording.operations import Kind


def written_in_parts(_, x):
    y = x * 1
    for row in range(3):
        y[row].add_(row + 1)
    column = y[:, 1]
    y[1:].mul_(2)
    left, right = y.split(2, dim=1)
    return left + right, column * 2, y.sum()


def decoded(self, x):
    """A loop that chooses its next input, as generation does."""
    token, found = x[:, 0].abs().long() % 5, []
    for _ in range(3):
        scores = self.head(torch.relu(self.hidden(self.table(token)))).log_softmax(-1)
        values, tokens = scores.topk(2)
        token = torch.where(values[:, 0] > values[:, 1] + 0.5, tokens[:, 0], tokens[:, 1])
        found.append(token)
    return torch.stack(found)


def decoder() -> nn.Module:
    return Model(decoded, table=nn.Embedding(5, 4), hidden=nn.Linear(4, 6), head=nn.Linear(6, 5))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "written in parts": lambda: Model(written_in_parts),
    "decoder": decoder,
    "transformer": lambda: nn.TransformerEncoderLayer(4, 2, 8),
    "batch norm": lambda: nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Dropout()
    ),
    "cells": lambda: Model(lambda s, x: [s.cell(row[None]) for row in x], cell=nn.LSTMCell(4, 3)),
}


def given(row: Any) -> list[tuple[Any, int]]:
    references = row.references
    pairs = references.items() if isinstance(references, dict) else enumerate(references)
    return [(location, number) for location, number in pairs if number is not None and number >= 0]


def given_instead(row: Any, location: Any, number: int | None) -> Any:
    if isinstance(row.references, dict):
        changed = {**row.references, location: number}
        return {place: own for place, own in changed.items() if own is not None}
    return tuple(number if place == location else own for place, own in enumerate(row.references))


# Each makes one mistake, or returns False where the log offers no place for it.


def wrong_parent(proof: Proof, chance: random.Random) -> bool:
    rows, parents = proof.recording.rows, list(proof.graph.parents)
    number = chance.choice([number for number in proof.graph.recorded if given(rows[number])])
    location, parent = chance.choice(given(rows[number]))
    others = [other for other in range(number) if other != parent]
    if not others:
        return False
    proof.replace_row(
        number, references=given_instead(rows[number], location, chance.choice(others))
    )
    return parents != list(
        proof.graph.parents
    )  # who wrote all of it since is the parent either way


def missing_parent(proof: Proof, chance: random.Random) -> bool:
    rows = proof.recording.rows
    number = chance.choice([number for number in proof.graph.recorded if given(rows[number])])
    location, _ = chance.choice(given(rows[number]))
    proof.replace_row(number, references=given_instead(rows[number], location, None))
    return True


def parent_too_many(proof: Proof, chance: random.Random) -> bool:
    entry = chance.randrange(1, len(proof.graph.parents))
    other = chance.randrange(entry)
    if other in proof.graph.parents[entry]:
        return False
    proof.graph.parents[entry] = (*proof.graph.parents[entry], other)
    proof.graph.children[other].append(entry)
    return True


def wrong_value(proof: Proof, chance: random.Random) -> bool:
    number = chance.choice(proof.graph.recorded)
    value = proof.recording.values[number].detach().clone(memory_format=torch.contiguous_format)
    element = value.view(-1)[chance.randrange(value.numel())]
    element.copy_(~element if value.dtype is torch.bool else element + 1)
    proof.recording.values[number] = value
    return True


def wrong_function(proof: Proof, chance: random.Random) -> bool:
    rows = proof.recording.rows
    made = [
        number for number in proof.graph.recorded if rows[number].operation.kind is Kind.OPERATION
    ]
    number = chance.choice(made)
    others = [
        rows[other].operation
        for other in made
        if rows[other].operation.func is not rows[number].operation.func
    ]
    proof.replace_row(number, operation=chance.choice(others))
    return True


def missing_operation(proof: Proof, chance: random.Random) -> bool:
    """As if the log had never heard of it, and its readers had got what it was given."""
    recording = proof.recording
    boundary = {
        number
        for part in (recording.inputs, recording.buffers, recording.outputs)
        for _, number in part
    }
    gone = chance.choice([number for number in proof.graph.recorded if number not in boundary])
    sources = [source for _, source in given(recording.rows[gone])]
    source = sources[0] if sources else None

    def moved(number: int | None) -> int | None:
        return (
            source
            if number == gone
            else number - 1
            if number is not None and number > gone
            else number
        )

    rows = []
    for row in recording.rows[:gone] + recording.rows[gone + 1 :]:
        for location, number in given(row):
            row = row._replace(references=given_instead(row, location, moved(number)))
        rows.append(row)
    recording.rows = rows
    for column in (recording.values, recording.storages):
        del column[gone]
    recording.versions = recording.versions[:gone] + recording.versions[gone + 1 :]
    recording.regions = {
        moved(number): region for number, region in recording.regions.items() if number != gone
    }
    recording.writes = [
        write._replace(entry=moved(write.entry))
        for write in recording.writes
        if write.entry != gone
    ]
    for name in ("inputs", "buffers", "outputs"):
        setattr(
            recording, name, [(place, moved(number)) for place, number in getattr(recording, name)]
        )
    for name in ("module_entries", "module_exits"):
        setattr(
            recording,
            name,
            [
                (call, [moved(n) for n in own if n != gone])
                for call, own in getattr(recording, name)
            ],
        )
    recording.booleans = {
        moved(number): value for number, value in recording.booleans.items() if number != gone
    }
    proof.rebuild()
    return True


def forgotten_write(proof: Proof, chance: random.Random) -> bool:
    writes, parents = proof.recording.writes, list(proof.graph.parents)
    if not writes:
        return False
    del writes[chance.randrange(len(writes))]
    proof.rebuild()
    return parents != list(proof.graph.parents)


def wrong_module(proof: Proof, chance: random.Random) -> bool:
    calls, rows = proof.recording.module_calls, proof.recording.rows
    number = chance.choice(proof.graph.recorded)
    address = calls[rows[number].module_call].address
    others = [call for call in range(len(calls)) if calls[call].address != address]
    if not others:
        return False
    proof.replace_row(number, module_call=chance.choice(others))
    return True


MISTAKES = (
    wrong_parent, missing_parent, parent_too_many, wrong_value, wrong_function, missing_operation,
    forgotten_write,
    wrong_module,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_random_mistake_is_found(name: str) -> None:
    torch.manual_seed(0)
    chance = random.Random(name)
    proof = Proof(MODELS[name](), torch.randn(3, 4))
    assert proof.report().passed
    num_made = 0
    for mistake in MISTAKES:
        for _ in range(2):
            broken = proof.copied()
            if mistake(broken, chance):
                num_made += 1
                assert not broken.report().passed, f"{mistake.__name__} in {name}"
    assert num_made > 8
