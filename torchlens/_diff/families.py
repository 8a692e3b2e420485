"""Names of operations that mean one thing in different libraries: `matmul`, `dot_general` and
`einsum` are products.
"""

from torchlens._recording.operation_kinds import ACTIVATIONS, VIEWS

_FAMILIES = {
    "product": "matmul mm bmm addmm addmv addbmm baddbmm linear dot mv einsum tensordot "
    "dotgeneral bilinear "
    "scaleddotproductattention innerproduct rmatmul conv1d conv2d conv3d convtranspose1d "
    "convtranspose2d convtranspose3d "
    "convgeneraldilated convolution",
    "add": "add iadd radd addany",
    "sub": "sub isub rsub subtract",
    "mul": "mul imul rmul multiply",
    "div": "div truediv itruediv rtruediv divide rdiv",
    "negative": "neg negative",
    "power": "pow ipow rpow integerpow square",
    "maximum": "relu relu6 max maximum clampmin amax reducemax clamp clip hardtanh",
    "minimum": "min minimum clampmax amin reducemin",
    "sigmoid": "sigmoid logistic expit",
    "normalisation": "layernorm batchnorm groupnorm instancenorm rmsnorm nativelayernorm "
    "nativebatchnorm fusedrmsnorm",
    "softmax": "softmax logsoftmax specialsoftmax speciallogsoftmax safesoftmax",
    "sum": "sum reducesum cumsum",
    "mean": "mean avgpool1d avgpool2d avgpool3d adaptiveavgpool1d adaptiveavgpool2d "
    "adaptiveavgpool3d",
    "pool": "maxpool1d maxpool2d maxpool3d maxpool2dwithindices reducewindowmax adaptivemaxpool2d",
    "lookup": "embedding gather indexselect take dynamicslice embeddingbag getitem slice narrow "
    "select",
    "join": "cat concat concatenate stack hstack vstack",
    "choose": "where maskedfill selectn",
    "recurrent": "lstm gru rnntanh rnnrelu lstmcell grucell",
    "cast": "to type float half double bfloat16 convertelementtype typeas",
    "resize": "interpolate upsample upsamplenearest2d upsamplebilinear2d upsamplebicubic2d "
    "repeatinterleave",
}
_FAMILY_OF = {name: family for family, names in _FAMILIES.items() for name in names.split()}


def acts(layer_type: str) -> bool:
    """Whether it is a function of each number by itself, as one takes for another by mistake."""
    return layer_type in ACTIVATIONS or _FAMILY_OF.get(layer_type) in ("maximum", "sigmoid")


def family(layer_type: str) -> str:
    """The family of a layer type; the type itself where it has none."""
    if layer_type in _FAMILY_OF:
        return _FAMILY_OF[layer_type]
    return "view" if layer_type in VIEWS else layer_type
