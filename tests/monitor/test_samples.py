"""A sample is what the tensor has, however its memory is read; and the bins of a step are those of
its samples.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from torchlens._monitor.record import statistics
from torchlens._monitor.record.samples import SAMPLE_SIZE, Sample, Sampler
from torchlens._monitor.record.statistics import summarized
from torchlens._monitor.store.bins import ZERO, bins_of, narrowed
from torchlens._monitor.store.columns import QUANTILES


def tensors() -> Iterable[torch.Tensor]:
    """Large and small, of several layouts and kinds of numbers."""
    generator = torch.Generator().manual_seed(0)
    for size in (1, 7, SAMPLE_SIZE, SAMPLE_SIZE + 1, 70_000, 300_001):
        yield torch.randn(size, generator=generator)
    yield torch.randn(50, 70, generator=generator, dtype=torch.float64, requires_grad=True)
    yield torch.randn(50, 70, generator=generator).t()
    for strided in (
        torch.randn(50, 70, generator=generator),
        torch.randn(512, 256, generator=generator),
    ):
        yield strided[:, ::2]
        yield strided.t()[3:]
        yield strided.chunk(3, dim=1)[1]
    yield torch.randn(9, 1, 8, generator=generator).expand(9, 300, 8)
    yield torch.randn(1, generator=generator).expand(2_000)
    yield torch.randn(90, generator=generator).view(9, 10)[:, 2:5]
    yield torch.randn(4, 8, 16, 16, generator=generator).contiguous(
        memory_format=torch.channels_last
    )
    yield torch.randn(5_000, generator=generator)[1_000:]
    yield (
        torch.complex(torch.randn(3_000), torch.randn(3_000)).conj().imag
    )  # with its sign still to be turned
    yield torch.randn(60, 60, generator=generator).to(torch.bfloat16)
    yield torch.randn(60, 60, generator=generator).half()
    for number in (float("nan"), float("inf"), -0.0):
        special = torch.randn(300_000, generator=generator)
        special[123_456] = number
        yield special


def test_numpy_and_torch_take_the_same_sample_and_range() -> None:
    by_numpy, by_torch = Sampler(), Sampler()
    by_torch.uses_numpy = False
    for tensor in tensors():
        mine, other = by_numpy.take(tensor), by_torch.take(tensor)
        assert mine is not None
        assert other is not None
        assert torch.equal(
            torch.as_tensor(mine.values).nan_to_num(7), torch.as_tensor(other.values).nan_to_num(7)
        )
        assert (mine.low is None) == (tensor.numel() <= SAMPLE_SIZE)
        exact = torch.aminmax(tensor.detach())
        for found in (mine, other):
            if (
                found.low is not None
            ):  # torch would be slow for large tensors that do not lie side by side
                np.testing.assert_array_equal(
                    [float(found.low), float(found.high)], [each.item() for each in exact]
                )


def test_a_sample_does_not_change_with_its_tensor() -> None:
    for size in (10, 5_000):
        tensor = torch.ones(size)
        sample = Sampler().take(tensor)
        tensor.zero_()
        assert sample is not None
        assert sample.values.min() == 1


def test_memory_that_was_given_back_is_not_read() -> None:
    """As sharded training does with the parameters of a module that has run."""
    for number in (0, 1_000):
        tensor = torch.ones(5_000)[number:]
        sampler = Sampler()
        assert sampler.take(tensor) is not None
        tensor.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="not allocated"):
            sampler.take(tensor)


def test_what_was_sampled_can_be_resized() -> None:
    """`tensor.numpy()` would take that away for good."""
    for tensor in (torch.ones(5), torch.ones(5_000)):
        assert Sampler().take(tensor) is not None
        tensor.resize_(10_000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [3, 500, 4_000])
def test_statistics_of_a_sparse_tensor_are_those_of_the_dense_one(
    num_rows: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 2_000, (num_rows,), generator=generator).repeat(
        2
    )  # each twice: its entries add up
    values = torch.randint(-8, 9, (2 * num_rows, 16), generator=generator).to(dtype) / 16 + 1 / 8
    sparse = torch.sparse_coo_tensor(rows[None], values, (2_000, 16), check_invariants=True)
    is_coalesced, dense = sparse.is_coalesced(), sparse.to_dense().double().numpy()
    stored = len(rows.unique()) * 16

    sample = Sampler().take(sparse)
    assert sample is not None
    columns = summarized([(7, sample, None)], {})

    assert sparse.is_coalesced() == is_coalesced
    assert sparse._nnz() == 2 * num_rows
    assert columns.series.tolist() == [7]
    assert columns.calls.tolist() == [1]
    assert columns.elements.tolist() == [dense.size]
    assert columns.flags.tolist() == [1]
    assert (columns.low[0], columns.high[0]) == (dense.min(), dense.max())
    assert columns.counts.sum() == columns.sampled[0]
    is_whole = stored <= SAMPLE_SIZE
    assert (columns.sampled[0] == columns.elements[0]) == is_whole
    close = 1e-6 if is_whole else 0.1
    np.testing.assert_allclose(
        np.sqrt(columns.squares[0] / columns.sampled[0]), np.sqrt(np.mean(dense**2)), rtol=close
    )
    zeros = columns.counts[columns.codes == ZERO].sum() / columns.sampled[0]
    np.testing.assert_allclose(zeros, np.mean(dense == 0), rtol=close)
    np.testing.assert_allclose(
        columns.quantiles[0], np.quantile(dense, QUANTILES), atol=1e-6 if is_whole else 0.3
    )


def test_a_tensor_without_values_has_no_sample() -> None:
    assert Sampler().take(torch.ones(3, device="meta")) is None
    assert Sampler().take(torch.ones(0)) is None


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bins_of_a_step_are_those_of_its_samples(dtype: type) -> None:
    generator = np.random.default_rng(0)
    rows: list[np.ndarray] = [generator.standard_normal(600).astype(dtype) for _ in range(6)]
    rows[1][::2] = 0.0
    rows[1][1::4] = -0.0
    rows[2][:5] = [1e-40, -1e-40, 0.0, -0.0, 1e-45]
    rows[3][:4] = [np.nan, np.inf, -np.inf, -np.nan]
    rows[4][:] = 0.0
    rows[5] *= 1e-320 if dtype is np.float64 else 1e-38

    sample = Sampler().take(torch.ones(600))
    assert sample is not None
    plan = sample.plan
    for chosen in ([0], [0, 1], [2], [0, 3], [0, 1, 2, 3, 4, 5]):
        columns = summarized(
            [(row, Sample(rows[row].copy(), None, None, plan), None) for row in chosen], {}
        )
        assert columns.series.tolist() == chosen
        for place, row in enumerate(chosen):
            start, end = columns.starts[place : place + 2]
            found = dict(
                zip(
                    columns.codes[start:end].tolist(),
                    columns.counts[start:end].tolist(),
                    strict=True,
                )
            )
            assert found == Counter(bins_of(narrowed(rows[row])).tolist())


def test_quantiles_of_numbers_beyond_float32_stay_finite_and_not_zero() -> None:
    samples = [
        Sampler().take(torch.full((50,), number, dtype=torch.float64))
        for number in (1e200, -1e200, 1e-200)
    ]
    columns = summarized(
        [(number, sample, None) for number, sample in enumerate(samples) if sample is not None], {}
    )
    limits = np.finfo(np.float32)
    np.testing.assert_array_equal(
        columns.quantiles[:, 4], [limits.max, -limits.max, limits.smallest_subnormal]
    )


def test_statistics_of_samples_of_all_lengths_are_those_of_each_alone() -> None:
    generator = np.random.default_rng(1)
    observations = []
    expected: list[np.ndarray] = []
    for number, count in enumerate((1, 2, 30, 255, 256, 257, 700, 1024, 5000) * 3):
        tensor = torch.from_numpy(generator.standard_normal(count).astype(np.float32))
        if number >= 18:
            tensor[generator.integers(count, size=3)] = torch.tensor([np.nan, np.inf, -np.inf])
        earlier = (
            torch.from_numpy(generator.standard_normal(count).astype(np.float32))
            if 9 <= number < 18
            else None
        )
        sample = Sampler().take(tensor)
        before = None if earlier is None else Sampler().take(earlier)
        assert sample is not None
        observations.append((number, sample, before))
        expected.append(
            sample.values - before.values if before is not None else sample.values.copy()
        )

    columns = summarized(observations, {9: (-1.0, 1.0), 12: (-1.0, 1.0)})

    assert columns.series.tolist() == list(range(27))
    for row, values in enumerate(expected):
        real = values[~np.isnan(values)]
        finite = values[np.isfinite(values)].astype(np.float64)
        assert columns.sampled[row] == len(values)
        if observations[row][1].plan.num_elements <= 1024 or row in range(9, 18):
            low, high = (real.min(), real.max()) if len(real) else (np.nan, np.nan)
            np.testing.assert_array_equal([columns.low[row], columns.high[row]], [low, high])
        np.testing.assert_allclose(columns.total[row], finite.sum(), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(columns.squares[row], np.square(finite).sum(), rtol=1e-12)
        quantiles = np.quantile(finite, QUANTILES) if len(finite) else np.full(9, np.nan)
        np.testing.assert_allclose(columns.quantiles[row], quantiles, rtol=1e-5, atol=1e-6)
        own = slice(*columns.starts[row : row + 2])
        found = dict(zip(columns.codes[own].tolist(), columns.counts[own].tolist(), strict=True))
        assert found == Counter(bins_of(values).tolist())
    for row in (9, 12):
        assert columns.saturated[row] == np.float32(np.mean(np.abs(expected[row]) >= 1))


def test_the_work_for_a_step_does_not_grow_with_the_number_of_its_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    def counted(name: str, own: Callable[..., Any], *args: Any, **more: Any) -> Any:
        calls.append(name)
        return own(*args, **more)

    for name in ("_quantiles", "_bin_counts", "row_statistics"):
        monkeypatch.setattr(statistics, name, partial(counted, name, getattr(statistics, name)))
    sampler = Sampler()
    samples = [sampler.take(torch.randn(size)) for size in (5, 64, 300, 900, 5000) * 20]
    summarized(
        [(number, sample, None) for number, sample in enumerate(samples) if sample is not None], {}
    )
    assert max(Counter(calls).values()) == 2
