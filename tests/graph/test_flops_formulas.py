"""FLOPs of single operations, each against a count written out here."""

from math import log2
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from jax.extend.core import Primitive, primitives

import torchlens as tl
from tests.networks import Model
from torchlens._graph.flops.registry import FORMULAS, FREE, Counting, counting_of
from torchlens._recording.operations import layer_type

A, B, C = torch.rand(2, 3), torch.rand(3, 4), torch.rand(4, 5)
SQUARE = torch.rand(4, 4) + 4 * torch.eye(4)
BATCH = torch.rand(3, 4, 4)
HEADS = torch.rand(1, 4, 5, 8)
FEW_HEADS = torch.rand(1, 2, 6, 8)

# A function of the tensors, and what it costs forward and backward where all of them want
# gradients.
OPERATIONS: dict[str, tuple[Any, list[torch.Tensor], int, int]] = {
    "@": (lambda a, b: a @ b, [A, B], 2 * 2 * 3 * 4, 2 * 48),
    "@ of a vector": (lambda a, b: a[0] @ b, [A, B], 2 * 3 * 4, 2 * 24),
    "@ of vectors": (lambda a: a[0] @ a[1], [A], 2 * 3, 2 * 6),
    "@ broadcast": (lambda a, b: a @ b, [torch.rand(5, 1, 2, 3), torch.rand(4, 3, 6)], 2 * 20 * 2 * 3 * 6, 2 * 1440),
    "__rmatmul__": (lambda a, b: b.__rmatmul__(a), [A, B], 48, 96),
    "mv": (lambda a: a.mv(a[0]), [SQUARE], 2 * 16, 64),
    "addmm": (lambda a, b: torch.addmm(a[:, :1], a, b), [A, B], 48, 96),
    "addmm by name": (lambda a, b: torch.addmm(input=a[:, :1], mat1=a, mat2=b), [A, B], 48, 96),
    "addmv": (lambda a, b: torch.addmv(a[:, 0], a, b[:, 0]), [A, B], 2 * 2 * 3, 24),
    "baddbmm": (lambda a: torch.baddbmm(a, a, a), [BATCH], 2 * 3 * 64, 768),
    "addbmm adds up a batch": (lambda a: torch.addbmm(a[0], a, a), [BATCH], 2 * 3 * 64, 768),
    "addr": (lambda a: torch.addr(a, a[0], a[1]), [SQUARE], 16, 32),
    "outer": (lambda a, b: torch.outer(a[0], b[0]), [A, B], 12, 24),
    "kron": (torch.kron, [A, B], 6 * 12, 144),
    "inner": (torch.inner, [torch.rand(2, 3), torch.rand(4, 3)], 2 * 2 * 3 * 4, 96),
    "vecdot": (torch.linalg.vecdot, [torch.rand(2, 4), torch.rand(2, 4)], 2 * 2 * 4, 32),
    "tensordot": (
        lambda a, b: torch.tensordot(a, b, ([1, 0], [0, 1])), [torch.rand(2, 3, 5), torch.rand(3, 2, 4)], 240, 480),
    "tensordot of two": (lambda a, b: torch.tensordot(a, b, 2), [torch.rand(5, 2, 3), torch.rand(2, 3, 4)], 240, 480),
    "bilinear": (F.bilinear, [torch.rand(2, 3), torch.rand(2, 4), torch.rand(5, 3, 4)], 2 * (2 * 5 * 12 + 2 * 5 * 4), 640),
    "cdist": (torch.cdist, [torch.rand(30, 6), torch.rand(40, 6)], 2 * 30 * 40 * 6, 28800),
    "einsum": (lambda a, b: torch.einsum("ij,jk->ik", a, b), [A, B], 48, 96),
    "einsum of three": (lambda a, b, c: torch.einsum("ij,jk,kl->il", a, b, c), [A, B, C], 48 + 80,
    256),
    "einsum with dots": (lambda a, b: torch.einsum("...ij,jk->...ik", a, b), [torch.rand(7, 2, 3),
    B], 7 * 48, 672),
    "einsum without an arrow": (lambda a, b: torch.einsum("ij,jk", a, b), [A, B], 48, 96),
    "einsum that sums first": (lambda a, b: torch.einsum("ij,jk->k", a, b), [A, B], 2 * 3 * 4, 48),
    "einsum that sums nothing": (lambda a, b: torch.einsum("i,j->ij", a[0], b[0]), [A, B], 12, 24),
    "einsum of one": (lambda a: torch.einsum("ij->ji", a), [A], 0, 0),
    "einsum by numbers": (lambda a, b: torch.einsum(a, [0, 1], b, [1, 2], [0, 2]), [A, B], 48, 96),
    "attention": (F.scaled_dot_product_attention, [HEADS, HEADS, HEADS], 2 * 2 * 4 * 5 * 5 * 8,
    2 * 3200),
    "causal attention, in full": (
        lambda q: F.scaled_dot_product_attention(query=q, key=q, value=q, is_causal=True), [HEADS],
        3200, 6400),
    "attention with fewer key heads": (
        lambda q, k: F.scaled_dot_product_attention(q, k, k, enable_gqa=True),
        [HEADS, FEW_HEADS], 2 * 2 * 4 * 5 * 6 * 8, 2 * 3840,
    ),
    "an operator of torch.ops": (torch.ops.aten.mm.default, [A, B], 48, 96),
    "a convolution of torch.ops": (
        lambda x, w: torch.ops.aten.convolution(x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0],
        1),
        [torch.rand(2, 3, 8, 8), torch.rand(4, 3, 3, 3)], 2 * 2 * 4 * 36 * 27, 2 * 15552,
    ),
    "a transposed convolution of torch.ops": (
        lambda x, w: torch.ops.aten.convolution(x, w, None, [1, 1], [0, 0], [1, 1], True, [0, 0],
        1),
        [torch.rand(2, 3, 8, 8), torch.rand(3, 4, 3, 3)], 2 * 2 * 3 * 64 * 36, 2 * 27648,
    ),
    "fft": (torch.fft.fft, [torch.rand(3, 8)], 3 * 5 * 8 * 3, 360),
    "fft of another length": (lambda x: torch.fft.fft(x, n=16, dim=0), [torch.rand(3, 8)],
    8 * 5 * 16 * 4, 2560),
    "rfft": (torch.fft.rfft, [torch.rand(3, 8)], 180, 180),
    "irfft": (lambda x: torch.fft.irfft(torch.complex(x, x)), [torch.rand(3, 5)], 180, 180),
    "fft2": (torch.fft.fft2, [torch.rand(3, 8, 8)], 3 * 5 * 64 * 6, 5760),
    "fftn": (torch.fft.fftn, [torch.rand(2, 4, 8)], 5 * 64 * 6, 1920),
    "stft": (
        lambda x: torch.stft(x, 16, hop_length=16, center=False, window=torch.ones(16),
        return_complex=True),
        [torch.rand(2, 64)], int(2 * 4 * 2.5 * 16 * log2(16)), 1280,
    ),
    "cholesky": (lambda a: torch.linalg.cholesky(a @ a.mT), [SQUARE], 128 + 64 // 3, 256 + 64 // 3),
    "inv": (torch.linalg.inv, [SQUARE], 2 * 64, 128),
    "det": (torch.linalg.det, [BATCH], 3 * 2 * 64 // 3, 128),
    "solve": (torch.linalg.solve, [SQUARE, torch.rand(4, 2)], 2 * 64 // 3 + 2 * 16 * 2,
    2 * 64 // 3 + 2 * 64),
    "solve_triangular": (
        lambda a, b: torch.linalg.solve_triangular(a, b, upper=True), [SQUARE, torch.rand(4, 2)],
        16 * 2, 64),
    "norm of vectors": (lambda a: torch.linalg.norm(a, ord=2, dim=-1), [torch.rand(3, 5, 4)], 0, 0),
    "norm of one vector": (lambda a: torch.linalg.norm(a, ord=2), [torch.rand(6)], 0, 0),
    "norm of matrices": (
        lambda a: torch.linalg.norm(a, ord=2, dim=(0, 1)), [torch.rand(6, 3, 5)],
        5 * (4 * 6 * 9 - 4 * 27 // 3), 5 * 180),
    "eigh": (lambda a: torch.linalg.eigh(a)[0], [SQUARE], 9 * 64, 576),
    "svd": (lambda a: torch.linalg.svd(a)[1], [torch.rand(6, 4)], 6 * 6 * 16 + 20 * 64, 1856),
    "qr": (lambda a: torch.linalg.qr(a)[0], [torch.rand(6, 4)], (12 * 6 * 16 - 4 * 64) // 3, 298),
    "matrix_power": (lambda a: torch.linalg.matrix_power(a, 5), [SQUARE], 3 * 128, 768),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_costs_what_was_worked_out_by_hand(name: str):
    function, tensors, forward, backward = OPERATIONS[name]
    inputs = [tensor.clone().requires_grad_() for tensor in tensors]
    history = tl.get_model_metadata(Model(lambda self, *args: function(*args)), inputs)
    assert history.flops_not_counted == {}
    assert (history.total_flops, history.total_flops_backward) == (forward, backward)


def test_a_layer_type_is_counted_or_free_but_not_both():
    assert not FREE & FORMULAS.keys()
    assert [counting_of(name) for name in ("conv2d", "relu", "frobnicate")] == list(Counting)


def test_a_registered_layer_type_is_the_name_of_something_in_torch():
    """A formula under a misspelt name would never be used."""
    operators = {schema.name.partition("::")[2] for schema in torch._C._jit_get_all_schemas()}
    known = {name.replace("_", "").lower() for name in operators}
    # Of torchvision, of torch's quantized operators, of Python alone, of newer releases of torch,
    # and of JAX, which lists most of its primitives.
    elsewhere = {
        "deformconv2d",
        "flexattention",
        "rmatmul",
        "vecdot",
        "groupedmm",
        "scaledgroupedmm",
        "lineardynamic",
        "raggeddotgeneral",
    }
    elsewhere |= {
        layer_type(value.name)
        for value in vars(primitives).values()
        if isinstance(value, Primitive)
    }
    assert {name for name in FORMULAS if name not in known} <= elsewhere


# The operations that the models of the zoo are made of.
OF_THE_ZOO = """
    abs acos adaptiveavgpool1d adaptiveavgpool2d adaptiveavgpool3d adaptivemaxpool2d add addcmul addmm all alphadropout
    amax and any arange argmax argsort asstrided astensor avgpool1d avgpool2d avgpool3d baddbmm batchnorm bernoulli
    bilinear bmm bool broadcasttensors buffer cat ceil celu channelshuffle chunk clamp clampmin clone col2im colindices
    contiguous conv1d conv2d conv3d convertindicesfromcootocsr convtranspose1d convtranspose2d convtranspose3d copy cos
    cosinesimilarity cpu crossentropyloss crowindices ctcloss cumsum data detach diff div dropout einsum elu embedding
    embeddingbag empty emptylike eq erf exp expand expandas expm1 featurealphadropout featuredropout fftfftn flatten
    flip float floor floordiv fractionalmaxpool2d fromnumpy full fulllike gather ge gelu getitem glu gridsampler
    groupedmm groupnorm gru grucell gt h hardshrink hardsigmoid hardswish hardtanh histc huberloss iadd identity im2col
    imul indexcopy indexfill indexselect indices input instancenorm int invert isalltrue isin isnan isub itruediv l1loss
    layernorm le leakyrelu linalgvectornorm linear linspace log log1p logicalnot logsigmoid logsoftmax logsumexp long
    lstm lstmcell lt maskedfill matmul matrixexp max maximum maxpool1d maxpool2d maxpool2dwithindices maxpool3d
    maxunpool2d mean meshgrid mh min mish mod movedim mseloss mul multinomial multiply mv narrow ne neg new newempty
    newfull newones newzeros nonzero onehot ones oneslike or output packpaddedsequence pad padpackedsequence
    pairwisedistance permute pixelshuffle pixelunshuffle poissonnllloss polar pow prelu radd rand randint randn
    randnlike real relu repeat repeatinterleave reshape reshapeas rmsnorm rmul rnnrelu rnntanh rnntanhcell roll rpow
    rrelu rsqrt rsub rtruediv scalartensor scaleddotproductattention scatter scatteradd scatterreduce scriptfunction
    selu setitem sigmoid sign silu sin smoothl1loss softmax softplus softshrink sort sparsecootensor sparsecsrtensor
    split splitwithsizes sqrt square squeeze stack sub sum swapaxes t tanh tensor tensorsplit threshold tile to topk
    tosparse tosparsecsr transpose tril truediv type typeas unbind unflatten unfold uniform unique2 unsqueeze
    upsamplebicubic2d upsamplebilinear2d upsamplelinear1d upsamplenearest2d values vdot view viewas viewascomplex
    viewasreal vmap weightnorm where zero zeros zeroslike
"""


def test_every_operation_of_the_zoo_is_counted_or_free():
    """But for what runs unseen inside another, and what takes as many products as the numbers ask
    for.
    """
    unknown = {name for name in OF_THE_ZOO.split() if counting_of(name) is Counting.UNKNOWN}
    assert unknown == {"matrixexp", "scriptfunction", "vmap"}
