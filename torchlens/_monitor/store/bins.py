"""The bins that numbers are counted in: two an octave, by the bits of the number itself.

A bin is a number of 10 bits, the upper 10 bits of a float32: sign, exponent, and the first bit of
the mantissa. So the bins of a power of two are [1, 1.5) and [1.5, 2) times it, the same in every
histogram of every run, and histograms merge by addition. Zero, +Inf, −Inf and NaN have bins of
their own.
"""

import numpy as np

NUM_BINS = 1024
PLUS_INF, NAN, MINUS_INF, ZERO = 510, 511, 1022, 1023
_LARGEST = np.float32(np.finfo(np.float32).max)
_SMALLEST = np.float32(np.finfo(np.float32).smallest_subnormal)


def narrowed(values: np.ndarray) -> np.ndarray:
    """As float32: what is finite stays so, what is not zero stays so."""
    if values.dtype == np.float32:
        return values
    with np.errstate(over="ignore", under="ignore"):
        found = values.astype(np.float32)
    lost = np.isinf(found) & np.isfinite(values)
    if lost.any():
        found[lost] = np.copysign(_LARGEST, values[lost])
    gone = (found == 0) & (values != 0)
    if gone.any():
        found[gone] = np.copysign(_SMALLEST, values[gone])
    return found


def bins_of(values: np.ndarray) -> np.ndarray:
    """The bin of each number (float32): its upper 10 bits, unless it is zero or NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32) >> np.uint32(22)
    found: np.ndarray = bits.astype(np.uint16)
    found[values == 0] = ZERO
    found[values != values] = NAN
    return found


def bin_edges(bins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each bin begins and ends; the same twice for zero and infinity, NaN for NaN."""
    codes = np.asarray(bins, np.uint32)
    magnitudes = codes & np.uint32(511)
    near = (magnitudes << np.uint32(22)).view(np.float32).astype(np.float64)
    far = ((magnitudes + np.uint32(1)) << np.uint32(22)).view(np.float32).astype(np.float64)
    far[magnitudes == 509] = 2.0**128
    is_negative = codes >= 512
    low, high = np.where(is_negative, -far, near), np.where(is_negative, -near, far)
    for code, value in ((ZERO, 0.0), (PLUS_INF, np.inf), (MINUS_INF, -np.inf), (NAN, np.nan)):
        low[codes == code] = high[codes == code] = value
    return low, high


def bin_order(bins: np.ndarray) -> np.ndarray:
    """Numbers by which bins sort from −Inf over zero to +Inf, NaN last."""
    codes = np.asarray(bins, np.int64)
    order = np.where(codes >= 512, 511 - codes, codes + 1)
    order[codes == ZERO] = 0
    order[codes == NAN] = 2000
    return order
