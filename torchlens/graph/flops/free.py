"""The operations that count as free: a few steps for each number that they read or write, or none at all.

Beside the products of a model they hardly count, and `torch.utils.flop_counter` leaves them out as well. They are listed
rather than guessed, so that an operation nobody has thought about is reported, not taken for nothing.
"""

__all__ = ["FREE"]

# What the log itself adds.
_BOUNDARIES = "input output buffer identity"

# One result for each number, with or without a second argument.
_ELEMENTWISE = """
    abs absolute acos acosh add addcdiv addcmul addrelu and angle arccos arccosh arcsin arcsinh arctan arctan2 arctanh
    asin asinh atan atan2 atanh bitwiseand bitwiseleftshift bitwisenot bitwiseor bitwiserightshift bitwisexor ceil clamp
    clampmax clampmin clip complex conj conjphysical copysign cos cosh deg2rad digamma div divide erf erfc erfinv exp exp2
    expm1 floatpower floor floordiv floordivide fmax fmin fmod frac frexp gcd heaviside hypot i0 igamma igammac imag
    invert lcm ldexp lerp lgamma log log10 log1p log2 logaddexp logaddexp2 logit lshift maximum minimum mod modf mul
    multiply mvlgamma nantonum neg negative nextafter not or polar polygamma positive pow quantizepertensor rad2deg real
    reciprocal remainder round rshift rsqrt sgn sign signbit sin sinc sinh sqrt square sub subtract tan truedivide truediv
    trunc fix xlogy xor iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift radd rsub rmul rtruediv
    rfloordiv rmod rpow rand ror rxor rlshift rrshift rdiv specialairyai specialbesselj0 specialbesselj1 specialbessely0
    specialbessely1 specialchebyshevpolynomialt specialchebyshevpolynomialu specialchebyshevpolynomialv
    specialchebyshevpolynomialw specialdigamma specialentr specialerf specialerfc specialerfcx specialerfinv specialexp2
    specialexpit specialexpm1 specialgammainc specialgammaincc specialgammaln specialhermitepolynomialh
    specialhermitepolynomialhe speciali0 speciali0e speciali1 speciali1e speciallaguerrepolynomiall
    speciallegendrepolynomialp speciallog1p speciallogit speciallogndtr specialmodifiedbesseli0 specialmodifiedbesseli1
    specialmodifiedbesselk0 specialmodifiedbesselk1 specialmultigammaln specialndtr specialndtri specialpolygamma
    specialpsi specialround specialscaledmodifiedbesselk0 specialscaledmodifiedbesselk1 specialshiftedchebyshevpolynomialt
    specialshiftedchebyshevpolynomialu specialshiftedchebyshevpolynomialv specialshiftedchebyshevpolynomialw specialsinc
    specialsphericalbesselj0 specialxlog1py specialxlogy specialzeta
"""

_ACTIVATIONS = """
    celu elu gelu glu hardshrink hardsigmoid hardswish hardtanh leakyrelu logsigmoid mish prelu prelukernel relu relu6
    rrelu rreluwithnoise selu sigmoid silu softplus softshrink tanh threshold softmax logsoftmax safesoftmax maskedsoftmax
    sparsesoftmax sparselogsoftmax specialsoftmax speciallogsoftmax nestedtensorsoftmaxwithshape
"""

_COMPARISONS = """
    eq equal ge gt isclose isfinite isin isinf isnan isneginf isposinf isreal le less lessequal greater greaterequal
    logicaland logicalnot logicalor logicalxor lt ne notequal maskedfill maskedscatter where isalltrue isanytrue
"""

_REDUCTIONS = """
    all amax amin aminmax any argmax argmin count countnonzero cross linalgcross cumprod cummax cummin cumsum
    cumulativetrapezoid diff dist frobeniusnorm gradient linalgpowsum linalgvectornorm logcumsumexp logsumexp
    speciallogsumexp max mean median min mode nanmean nanmedian nanquantile nansum nativenorm norm normexceptdim prod
    quantile segmentreduce sparsesum sparsecsrsum sparsecsrprod std stdmean sum sumtosize trace trapezoid trapz var
    varmean histc histogram histogramdd bincount renorm
"""

_NORMALISATIONS = """
    batchnorm cudnnbatchnorm fusedrmsnorm groupnorm instancenorm layernorm localresponsenorm nativebatchnorm
    nativebatchnormlegit nativebatchnormlegitnotraining nativegroupnorm nativelayernorm rmsnorm weightnorm
    weightnorminterface normalize cosinesimilarity pairwisedistance
"""

_LOSSES = """
    binarycrossentropy binarycrossentropywithlogits cosineembeddingloss crossentropyloss ctcloss hingeembeddingloss
    huberloss kldiv l1loss marginrankingloss mseloss multilabelmarginloss multimarginloss nllloss nllloss2d nlllossnd
    poissonnllloss smoothl1loss softmarginloss tripletmarginloss
"""

_POOLING = """
    adaptiveavgpool1d adaptiveavgpool2d adaptiveavgpool3d adaptivemaxpool1d adaptivemaxpool2d adaptivemaxpool3d avgpool1d
    avgpool2d avgpool3d fractionalmaxpool2d fractionalmaxpool3d maxpool1d maxpool1dwithindices maxpool2d
    maxpool2dwithindices maxpool3d maxpool3dwithindices maxunpool2d maxunpool3d affinegridgenerator gridsampler
    gridsampler2d gridsampler3d interpolate upsample upsamplebicubic2d upsamplebicubic2daa upsamplebilinear2d
    upsamplebilinear2daa upsamplelinear1d upsamplenearest1d upsamplenearest2d upsamplenearest3d upsamplenearestexact1d
    upsamplenearestexact2d upsamplenearestexact3d upsampletrilinear3d roialign roipool psroialign psroipool nms
"""

_SHAPES = """
    adjoint alias asstrided atleast1d atleast2d atleast3d broadcasttensors broadcastto cartesianprod channelshuffle chunk
    col2im combinations columnstack diag diagembed diagflat diagonal linalgdiagonal dsplit dstack expand expandas flatten
    flip fliplr flipud h hsplit hstack im2col matrixh meshgrid mh moveaxis movedim mt narrow nativechannelshuffle permute
    pixelshuffle pixelunshuffle ravel repeat repeatinterleave reshape reshapealias reshapeas roll rot90 select slice split
    splitwithsizes squeeze stack swapaxes swapdims t tensorsplit tile transpose unbind unflatten unfold unsafechunk
    unsafesplit unsafesplitwithsizes unsafeview unsqueeze view viewas viewascomplex viewasreal vsplit vstack blockdiag cat
    concat concatenate rowstack pad constantpadnd padcircular reflectionpad1d reflectionpad2d reflectionpad3d
    replicationpad1d replicationpad2d replicationpad3d tril triu trilindices triuindices vander linalgvander
    packpaddedsequence padpackedsequence padsequence chunkcat refinenames rename assubclass resolveconj resolveneg
    fftfftshift fftifftshift
"""

_COPIES = """
    bfloat16 bool byte char cdouble cfloat chalf clone contiguous copy cpu cuda data deepcopy detach double float half int
    lazyclone lift liftfresh long pinmemory short to tocopy todense tomkldnn tosparse tosparsebsc tosparsebsr tosparsecsc
    tosparsecsr topaddedtensor type typeas dequantize quantizeperchannel quantizepertensordynamic
    fakequantizepertensoraffine fakequantizeperchannelaffine coalesce indices values colindices ccolindices crowindices
    rowindices convertindicesfromcootocsr convertindicesfromcsrtocoo sparsemask sparseresize intrepr wait arange astensor
    asarray bartlettwindow blackmanwindow empty emptylike emptypermuted emptystrided eye fftfftfreq fftrfftfreq fill
    filldiagonal frombuffer fromfile fromnumpy full fulllike hammingwindow hannwindow kaiserwindow linspace logspace new
    newempty newemptystrided newfull newones newtensor newzeros ones oneslike range resize resizeas scalartensor set
    sparsebsctensor sparsebsrtensor sparsecompressedtensor sparsecootensor sparsecsctensor sparsecsrtensor spdiags tensor
    zero zeros zeroslike nestedtensor nestedtensorfromtensorlist nestedtensorfrommask nestedfrompadded
    nestedfrompaddedtensor nestedviewfromjagged nestedviewfrombuffer nestedgetvalues nestedgetoffsets nestedgetlengths
    nestedtopaddedtensor jaggedtopaddeddenseforward paddeddensetojaggedforward fromdlpack
"""

_INDEXING = """
    argsort argwhere asstridedscatter bucketize diagonalscatter embedding embeddingbag embeddingrenorm gather getitem
    index indexadd indexcopy indexfill indexput indexreduce indexselect kthvalue maskedselect msort nonzero nonzerostatic
    onehot put scatter scatteradd scatterreduce searchsorted selectscatter setitem slicescatter sort take takealongdim
    topk unique unique2 uniqueconsecutive uniquedim unsafeindex unsafeindexput segmentcsr
"""

_RANDOM = """
    alphadropout bernoulli binomial cauchy dropout exponential featurealphadropout featuredropout gamma geometric
    lognormal multinomial nativedropout normal poisson rand randint randintlike randlike randn randnlike random randperm
    sampledirichlet standardgamma uniform
"""

FREE: frozenset[str] = frozenset(
    " ".join((
        _BOUNDARIES, _ELEMENTWISE, _ACTIVATIONS, _COMPARISONS, _REDUCTIONS, _NORMALISATIONS, _LOSSES, _POOLING, _SHAPES,
        _COPIES, _INDEXING, _RANDOM,
    )).split()
)  # fmt: skip
