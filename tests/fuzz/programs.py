"""Random programs, as hypothesis makes them."""

from hypothesis import strategies as st

from tests.fuzz.machine import OPERATIONS

_numbers = st.integers(0, 6)
_simple = st.tuples(st.sampled_from(sorted(OPERATIONS)), _numbers, _numbers, _numbers)
_block = st.lists(_simple, min_size=1, max_size=4)
_inner = st.one_of(_simple, st.tuples(st.just("module"), _numbers, _numbers, _numbers, _block))
_compound = st.one_of(
    st.tuples(st.just("loop"), st.integers(2, 3), st.lists(_inner, min_size=1, max_size=3)),
    st.tuples(st.just("branch"), _numbers, _block, _block),
    st.tuples(st.just("module"), _numbers, _numbers, _numbers, st.lists(_inner, max_size=3)),
)
programs = st.lists(st.one_of(_simple, _simple, _simple, _compound), min_size=1, max_size=14)
