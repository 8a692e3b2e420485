"""The formula of `einsum`: one product after another, in the order torch takes."""

from collections.abc import Iterator, Sequence
from math import prod

from torchlens._graph.flops.call import Call, Operand, Product, Shape

Term = tuple[str, ...]  # the index of each dimension


def einsum(call: Call) -> Iterator[Product]:
    """Operands are multiplied two by two: from left to right, or along the path that torch was
    given.
    """
    equation = call.value(0, "equation")
    if not isinstance(equation, str):
        raise TypeError(f"an equation is text, not {equation!r}")
    locations = call.inside(1, "operands") or [
        location for location in call.shapes if location not in (0, "equation")
    ]
    shapes = [call.shapes[location] for location in locations]
    terms, result = _parse(equation, shapes)
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        for index, size in zip(term, shape, strict=True):
            sizes[index] = max(size, sizes.get(index, 0))
    factors: list[tuple[frozenset[str], Operand]] = [
        (frozenset(term), (location,)) for term, location in zip(terms, locations, strict=True)
    ]
    path = call.value(2, "path")
    while len(factors) > 1:
        at = (0, 1) if not path else (path[0], path[1])
        path = path[2:] if path else None
        first, second = factors[at[0]], factors[at[1]]
        others = [factor for position, factor in enumerate(factors) if position not in at]
        kept = frozenset(result).union(*(indices for indices, _ in others))
        joined = first[0] | second[0]
        summed = (first[0] & second[0]) - kept
        # An index of one factor alone that is wanted no further is summed before they are
        # multiplied.
        size = prod(sizes[index] for index in joined & (kept | summed))
        has_sums = any(sizes[index] > 1 for index in summed)
        yield Product(2 * size if has_sums else size, (first[1], second[1]))
        made = (joined & kept, (*first[1], *second[1]))
        factors = [*others, made] if path is not None else [made, *others]


def _parse(equation: str, shapes: Sequence[Shape]) -> tuple[list[Term], Term]:
    """The indices of each operand and of the result; the dimensions of an ellipsis are numbered
    from the end.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    written = left.split(",")
    terms = [_expand(term, len(shape)) for term, shape in zip(written, shapes, strict=True)]
    if arrow:
        num_hidden = (
            sum(index.startswith(".") for index in set().union(*terms)) if "..." in right else 0
        )
        return terms, _expand(right, len(right.replace("...", "")) + num_hidden)
    everything = [index for term in terms for index in term]
    alone = {index for index in everything if index.startswith(".") or everything.count(index) == 1}
    return terms, tuple(alone)


def _expand(term: str, num_dims: int) -> Term:
    before, dots, after = term.partition("...")
    num_hidden = num_dims - len(before) - len(after)
    if num_hidden and not dots:
        raise ValueError(f"{term} has other dimensions than its operand")
    return (*before, *(f".{number}" for number in range(num_hidden, 0, -1)), *after)
