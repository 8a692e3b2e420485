"""Groups of operations by what they do, named as in labels (`layer_type`): the one list that all
features use.

Each group is a set of names, of torch's operations and of JAX's primitives (`dotgeneral`,
`reducesum`) together. An operation is in one group; the groups below the line name properties of
operations from several groups.
"""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Added by the log.
BOUNDARIES = _words("""
    buffer identity input output
""")

# One result for each number, with or without a second argument. (`rand` is `__rand__`; it is among
# RANDOM, too.)
ELEMENTWISE = _words("""
    abs absolute acos acosh add addany addcdiv addcmul addrelu and angle arccos arccosh arcsin
    arcsinh arctan arctan2 arctanh asin asinh atan atan2 atanh besseli0e besseli1e bitwiseand
    bitwiseleftshift bitwisenot bitwiseor bitwiserightshift bitwisexor cbrt ceil clamp clampmax
    clampmin clip clz complex conj conjphysical copysign cos cosh deg2rad digamma div divide erf
    erfc erfinv exp exp2 expm1 fix floatpower floor floordiv floordivide fmax fmin fmod frac frexp
    gcd heaviside hypot i0 iadd iand ifloordiv igamma igammac igammagrada ilshift imod imul
    integerpow invert ior ipow irshift isub itruediv ixor lcm ldexp lerp lgamma log log10 log1p log2
    logaddexp logaddexp2 logit lshift maximum minimum mod modf mul multiply mvlgamma nantonum neg
    negative nextafter not or polar polygamma populationcount positive pow quantizepertensor rad2deg
    radd rand rdiv reciprocal reduceprecision regularizedincompletebeta rem remainder rfloordiv
    rlshift rmod rmul ror round rpow rrshift rshift rsqrt rsub rtruediv rxor sgn shiftleft
    shiftrightarithmetic shiftrightlogical sign signbit sin sinc sinh specialairyai specialbesselj0
    specialbesselj1 specialbessely0 specialbessely1 specialchebyshevpolynomialt
    specialchebyshevpolynomialu specialchebyshevpolynomialv specialchebyshevpolynomialw
    specialdigamma specialentr specialerf specialerfc specialerfcx specialerfinv specialexp2
    specialexpit specialexpm1 specialgammainc specialgammaincc specialgammaln
    specialhermitepolynomialh specialhermitepolynomialhe speciali0 speciali0e speciali1 speciali1e
    speciallaguerrepolynomiall speciallegendrepolynomialp speciallog1p speciallogit speciallogndtr
    specialmodifiedbesseli0 specialmodifiedbesseli1 specialmodifiedbesselk0 specialmodifiedbesselk1
    specialmultigammaln specialndtr specialndtri specialpolygamma specialpsi specialround
    specialscaledmodifiedbesselk0 specialscaledmodifiedbesselk1 specialshiftedchebyshevpolynomialt
    specialshiftedchebyshevpolynomialu specialshiftedchebyshevpolynomialv
    specialshiftedchebyshevpolynomialw specialsinc specialsphericalbesselj0 specialxlog1py
    specialxlogy specialzeta sqrt square sub subtract tan truediv truedivide trunc xlogy xor zeta
""")

ACTIVATIONS = _words("""
    celu elu gelu glu gumbelsoftmax hardshrink hardsigmoid hardswish hardtanh leakyrelu logistic
    logsigmoid logsoftmax maskedsoftmax mish nestedtensorsoftmaxwithshape prelu prelukernel relu
    relu6 rrelu rreluwithnoise safesoftmax selu sigmoid silu softmax softmin softplus softshrink
    softsign sparselogsoftmax sparsesoftmax speciallogsoftmax specialsoftmax tanh tanhshrink
    threshold
""")

DROPOUTS = _words("""
    alphadropout dropout dropout1d dropout2d dropout3d featurealphadropout featuredropout
    nativedropout
""")

COMPARISONS = _words("""
    eq eqto equal ge greater greaterequal gt isalltrue isanytrue isclose isfinite isin isinf isnan
    isneginf isposinf isreal le less lessequal leto logicaland logicalnot logicalor logicalxor lt
    ltto maskedfill maskedscatter ne notequal selectn where
""")

REDUCTIONS = _words("""
    all amax amin aminmax any argmax argmin bincount count countnonzero cross cumlogsumexp cummax
    cummin cumprod cumsum cumulativetrapezoid diff dist frobeniusnorm gradient histc histogram
    histogramdd linalgcross linalgpowsum linalgvectornorm logcumsumexp logsumexp max mean median min
    mode nanmean nanmedian nanquantile nansum nativenorm norm normexceptdim prod quantile reduceand
    reducemax reducemin reduceor reduceprod reducesum reducexor renorm segmentreduce sparsecsrprod
    sparsecsrsum sparsesum speciallogsumexp std stdmean sum sumtosize trace trapezoid trapz var
    varmean
""")

NORMALISATIONS = _words("""
    batchnorm cudnnbatchnorm fusedrmsnorm groupnorm instancenorm layernorm localresponsenorm
    nativebatchnorm nativebatchnormlegit nativebatchnormlegitnotraining nativegroupnorm
    nativelayernorm normalize rmsnorm weightnorm weightnorminterface
""")

DISTANCES = _words("""
    cosinesimilarity pairwisedistance
""")

LOSSES = _words("""
    binarycrossentropy binarycrossentropywithlogits cosineembeddingloss crossentropyloss ctcloss
    hingeembeddingloss huberloss kldiv l1loss marginrankingloss mseloss multilabelmarginloss
    multimarginloss nllloss nllloss2d nlllossnd poissonnllloss smoothl1loss softmarginloss
    tripletmarginloss
""")

# Pooling, and other changes of resolution.
POOLING = _words("""
    adaptiveavgpool1d adaptiveavgpool2d adaptiveavgpool3d adaptivemaxpool1d adaptivemaxpool2d
    adaptivemaxpool3d affinegridgenerator avgpool1d avgpool2d avgpool3d fractionalmaxpool2d
    fractionalmaxpool3d gridsampler gridsampler2d gridsampler3d interpolate maxpool1d
    maxpool1dwithindices maxpool2d maxpool2dwithindices maxpool3d maxpool3dwithindices maxunpool2d
    maxunpool3d nms psroialign psroipool reducewindow reducewindowmax reducewindowmin
    reducewindowsum roialign roipool selectandgatheradd selectandscatter selectandscatteradd
    upsample upsamplebicubic2d upsamplebicubic2daa upsamplebilinear2d upsamplebilinear2daa
    upsamplelinear1d upsamplenearest1d upsamplenearest2d upsamplenearest3d upsamplenearestexact1d
    upsamplenearestexact2d upsamplenearestexact3d upsampletrilinear3d
""")

# Views; some of them copy where no view is possible.
VIEWS = _words("""
    adjoint alias asstrided atleast1d atleast2d atleast3d broadcastindim broadcasttensors
    broadcastto chunk diagonal dsplit expand expandas flatten getitem h hsplit imag linalgdiagonal
    matrixh mh moveaxis movedim mt narrow permute ravel real reshape reshapealias reshapeas select
    slice split splitwithsizes squeeze swapaxes swapdims t tensorsplit transpose unbind unflatten
    unfold unsafechunk unsafesplit unsafesplitwithsizes unsafeview unsqueeze unstack view viewas
    viewascomplex viewasreal vsplit
""")

# Concatenation, repetition, padding, permutation.
ARRANGEMENTS = _words("""
    assubclass blockdiag cartesianprod cat channelshuffle chunkcat col2im columnstack combinations
    concat concatenate constantpadnd diag diagembed diagflat dstack fftfftshift fftifftshift flip
    fliplr flipud hstack im2col linalgvander meshgrid nativechannelshuffle packpaddedsequence pad
    padcircular padpackedsequence padsequence pixelshuffle pixelunshuffle refinenames
    reflectionpad1d reflectionpad2d reflectionpad3d rename repeat repeatinterleave replicationpad1d
    replicationpad2d replicationpad3d resolveconj resolveneg rev roll rot90 rowstack stack tile tril
    trilindices triu triuindices vander vstack
""")

# Copies, and changes of type, place or layout.
CONVERSIONS = _words("""
    bfloat16 bitcastconverttype bool byte ccolindices cdouble cfloat chalf char clone coalesce
    colindices contiguous convertelementtype convertindicesfromcootocsr convertindicesfromcsrtocoo
    copy cpu crowindices cuda data deepcopy dequantize detach deviceput double
    fakequantizeperchannelaffine fakequantizepertensoraffine float half indices int intrepr
    lazyclone lift liftfresh long name optimizationbarrier pinmemory quantizeperchannel
    quantizepertensordynamic rowindices shardingconstraint short sparsemask sparseresize
    stopgradient to tocopy todense tomkldnn topaddedtensor tosparse tosparsebsc tosparsebsr
    tosparsecsc tosparsecsr type typeas values wait
""")

# Tensors made of nothing, or of Python numbers.
CREATIONS = _words("""
    arange asarray astensor bartlettwindow blackmanwindow eye fftfftfreq fftrfftfreq fill
    filldiagonal frombuffer fromdlpack fromfile fromnumpy full fulllike hammingwindow hannwindow
    iota jaggedtopaddeddenseforward kaiserwindow linspace logspace nestedfrompadded
    nestedfrompaddedtensor nestedgetlengths nestedgetoffsets nestedgetvalues nestedtensor
    nestedtensorfrommask nestedtensorfromtensorlist nestedtopaddedtensor nestedviewfrombuffer
    nestedviewfromjagged newfull newones newtensor newzeros ones oneslike paddeddensetojaggedforward
    range scalartensor set sparsebsctensor sparsebsrtensor sparsecompressedtensor sparsecootensor
    sparsecsctensor sparsecsrtensor spdiags tensor zero zeros zeroslike
""")

# Uninitialised memory.
UNINITIALISED = _words("""
    empty empty2 emptylike emptypermuted emptyquantized emptystrided new newempty newemptystrided
    resize resizeas
""")

INDEXING = _words("""
    approxtopk argsort argwhere asstridedscatter bucketize diagonalscatter dynamicslice
    dynamicupdateslice embedding embeddingbag embeddingrenorm gather get index indexadd indexcopy
    indexfill indexput indexreduce indexselect kthvalue maskedselect msort nonzero nonzerostatic
    onehot put scatter scatteradd scattermax scattermin scattermul scatterreduce searchsorted
    segmentcsr selectscatter setitem slicescatter sort swap take takealongdim topk unique unique2
    uniqueconsecutive uniquedim unsafeindex unsafeindexput
""")

# Random numbers other than those of a dropout.
RANDOM = _words("""
    bernoulli binomial cauchy exponential gamma geometric lognormal multinomial normal poisson rand
    randint randintlike randlike randn randnlike random randombits randomfoldin randomgamma
    randomseed randomsplit randomunwrap randomwrap randperm rngbitgenerator rnguniform
    sampledirichlet standardgamma threefry2x32 uniform
""")

# Between processes; and what spreads a tensor over them, or brings it back. (`gather` and `scatter`
# are among INDEXING.)
COLLECTIVES = _words("""
    allgather allgatherbase allgathercoalesced allgatherintotensor allgatherintotensorcoalesced
    allgatherintotensorout allgathersingle allreduce allreducecoalesced alltoall alltoallsingle
    axisindex batchp2pops broadcast fromtorchtensor irecv isend pmax pmin ppermute psum
    raggedalltoall recv redistribute reduce reducescatter reducescatterbase reducescattersingle
    reducescattertensor reducescattertensorcoalesced reducescattertensorout send totorchtensor
    waittensor
""")

# -- properties

# The output has the same elements as the input.
SAME_NUMBERS = VIEWS | {"clone", "contiguous", "detach", "identity"}

# Operations that may return their argument itself.
MAY_RETURN_ARGUMENT = _words("contiguous cpu double dropout float identity output to type typeas")

# The order of arguments does not matter.
COMMUTATIVE = _words("""
    add and bitwiseand bitwiseor bitwisexor eq iadd imul logicaland logicalor logicalxor maximum
    minimum mul multiply ne or output radd rmul xor
""")
