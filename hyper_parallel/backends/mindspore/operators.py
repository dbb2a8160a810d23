"""MindSpore's operators by the canonical names that the layout rules know them by.

MindSpore names what runs below its functions: `x + y` and `mint.add(x, y)` are both "AddExt". What it does not tell of
goes by a name of ours: an index is "getitem" or "setitem_".
"""

from __future__ import annotations

from typing import Any, Callable, Hashable, Mapping

import mindspore as ms

from hyper_parallel.core.rules.call import bind
from hyper_parallel.core.rules.table import Operator, known_as, parameters_of

_POINTWISE = (
    "Abs ACos ASin Atan Ceil Cos Cosh Erf Erfc Exp Exp2 Expm1 Floor Frac GeLU Hardtanh Elu Log Log10 Log1p "
    "Log2 LogSigmoid Mish Reciprocal ReLU ReLU6 Round Rsqrt SeLU Sigmoid Sign SiLU Sin Sinh Softplus Softsign Sqrt "
    "Square Tan Tanh Trunc Xlogy Atan2 Pow Maximum Minimum Polar Addcmul Addcdiv"
)
"""Operators that the rules know by the same name in small letters, and whose newer form ends with "Ext"."""

_METHODS = (
    "Acos Add Argmax Argmin Argsort Asin Atan Chunk Cumsum Frac Imag Logsumexp Matmul Max Mean Median Min Mul Pow "
    "Prod Real Squeeze Std Sub Sum Tril Topk Unsqueeze Var Xlogy"
)
"""Methods of tensors whose former arguments still work: as "Deprecated", and else as the rules have them."""

_OVERWRITING = "Elu Exp Floor Hardtanh Log ReLU SiLU Sigmoid Sign Tanh Threshold"
"""Functions of one tensor that "Inplace" stands before where they overwrite it."""

_NAMES: dict[str, tuple[str, str | None]] = {
    "DeprecatedTranspose DeprecatedPermute": ("permute", None),
    "DeprecatedTile": ("repeat", None),
    "DeprecatedReduceAll": ("all", None),
    "DeprecatedReduceAny": ("any", None),
    "DeprecatedSplit": ("split", None),
    "DeprecatedGather": ("take_rows", None),
    "DeprecatedIndexSelect": ("index_select", None),
    "DeprecatedWhere DeprecatedSelect": ("where", "input condition other"),
    "DeprecatedTypeAs": ("type_as", None),
    "DeprecatedViewAs": ("view_as", None),
    "DeprecatedExpandAs": ("expand_as", None),
    "Acosh AcoshExt Asinh AsinhExt Atanh Erfinv FastGeLU HSigmoid HSwish DivNoNan Logaddexp Logaddexp2": (
        "pointwise",
        None,
    ),
    "GeluExt": ("gelu", None),
    "NanToNum": ("nan_to_num", None),
    "IsClose": ("isclose", None),
    "Threshold": ("threshold", None),
    "LeakyReLU LeakyReLUExt": ("leaky_relu", None),
    "Mod FloorMod RemainderTensorTensor RemainderTensorScalar RemainderScalarTensor": ("remainder", None),
    "FmodTensor FmodScalar": ("fmod", None),
    "FloorDiv FloorDivScalar": ("floor_divide", None),
    "PowTensorScalar PowScalarTensor": ("pow", None),
    "ClampScalar ClampTensor": ("clamp", None),
    "Equal EqScalar": ("eq", None),
    "NotEqual NeScalar": ("ne", None),
    "Greater GreaterScalar": ("gt", None),
    "GreaterEqual GreaterEqualScalar": ("ge", None),
    "Less LessScalar": ("lt", None),
    "LessEqual LessEqualScalar": ("le", None),
    "LogicalAnd": ("logical_and", None),
    "LogicalOr": ("logical_or", None),
    "LogicalXor": ("logical_xor", None),
    "LogicalNot": ("logical_not", None),
    "BitwiseAnd BitwiseAndTensor BitwiseAndScalar": ("bitwise_and", None),
    "BitwiseOr BitwiseOrTensor BitwiseOrScalar": ("bitwise_or", None),
    "BitwiseXor BitwiseXorTensor BitwiseXorScalar": ("bitwise_xor", None),
    "BitwiseNot": ("bitwise_not", None),
    "IsFinite": ("isfinite", None),
    "IsInf": ("isinf", None),
    "IsNan": ("isnan", None),
    "Add AddN AddExt AddScalar": ("add", "input other alpha"),
    "Sub SubExt SubScalar": ("sub", "input other alpha"),
    "Mul Muls": ("mul", None),
    "Div Divs RealDiv DivMod DivMods": ("div", "input other rounding_mode"),
    "DivNoNan": ("pointwise", None),
    "Neg": ("neg", None),
    "Real Imag Conj RealView ImagView": ("identity", None),
    "ToOther TypeAs": ("type_as", None),
    "Detach": ("detach", None),
    "Contiguous Identity Copy Clone CellBackwardHook Depend": ("identity", None),
    "StopGradient": ("detach", None),
    "Select": ("where", None),
    "MaskedFill MaskedFillScalar": ("masked_fill", None),
    "Lerp LerpScalar": ("lerp", None),
    "BiasAdd": ("bias_add", None),
    "Dense": ("linear", None),
    "All": ("all", None),
    "Any": ("any", None),
    "MatMulExt BatchMatMulExt MmExt Mv Dot Vdot": ("matmul", None),
    "Outer": ("outer", None),
    "Einsum EinsumExt": ("einsum", None),
    "Addmm Baddbmm": ("addmm", "input left right beta alpha"),
    "Conv1DExt": ("conv1d", None),
    "SumExt ReduceSum": ("sum", None),
    "MeanExt ReduceMean": ("mean", None),
    "ReduceMax": ("amax", None),
    "ReduceMin": ("amin", None),
    "ReduceProd ProdExt": ("prod", None),
    "Std": ("std", "input dim correction keepdim"),
    "ReduceStd StdMean VarMean": ("std_mean", None),
    "Var": ("var", "input dim correction keepdim"),
    "LogSumExp": ("logsumexp", None),
    "Norm LinalgVectorNorm": ("norm", "input p dim keepdim"),
    "Max MaxDim": ("max", None),
    "Min MinDim": ("min", None),
    "ReduceAll AllExt": ("all", None),
    "ReduceAny AnyExt": ("any", None),
    "Argmax ArgMaxExt": ("argmax", None),
    "Argmin ArgMinExt": ("argmin", None),
    "CountNonZero": ("count_nonzero", None),
    "CumSum CumsumExt": ("cumsum", None),
    "CumProd": ("cumprod", None),
    "Cummax": ("cummax", None),
    "Cummin CumminExt": ("cummin", None),
    "LogSoftmax LogSoftmaxExt": ("log_softmax", None),
    "LayerNorm": ("layer_norm_from", "input weight bias begin begin_of_weights epsilon"),
    "RmsNorm": ("rms_norm_from", None),
    "GLU Swiglu": ("glu", None),
    "Reshape View": ("reshape", "input *shape"),
    "FlattenExt FlattenView": ("flatten", None),
    "ViewAs": ("view_as", None),
    "DiagonalView": ("diagonal", None),
    "Transpose TransposeView": ("permute", "input *dims"),
    "TransposeExt TransposeExtView": ("transpose", None),
    "TExt": ("transpose_last", None),
    "ExpandDims ExpandDimsView": ("unsqueeze", None),
    "Squeeze": ("squeeze", "input dim"),
    "BroadcastTo BroadcastToView ExpandView": ("expand", "input *shape"),
    "ExpandAs": ("expand_as", None),
    "Tile Repeat": ("repeat", "input *repeats"),
    "RepeatInterleaveInt RepeatInterleaveTensor": ("repeat_interleave", None),
    "SplitTensor SplitTensorView SplitWithSize SplitWithSizeView": ("split", None),
    "Chunk ChunkView": ("chunk", None),
    "UnstackExt UnstackExtView": ("unbind", None),
    "SelectExt SelectExtView": ("select", None),
    "Narrow NarrowView": ("narrow", None),
    "SliceExt SliceExtView": ("slice", None),
    "Concat": ("cat", None),
    "StackExt Stack": ("stack", None),
    "Roll": ("roll", None),
    "ReverseV2": ("flip", "input dims"),
    "TrilExt Tril": ("tril", None),
    "TriuExt Triu": ("triu", None),
    "ConstantPadND": ("pad", "input pad value"),
    "PadV3": ("pad", "input pad value mode"),
    "Split": ("chunk", "input dim chunks"),
    "Gather": ("take_rows", "input index dim batch_dims"),
    "IndexSelect": ("index_select", None),
    "Embedding": ("embedding", None),
    "GatherD": ("gather", None),
    "Scatter ScatterValue": ("scatter", None),
    "ScatterAddExt": ("scatter_add", None),
    "IndexAddExt": ("index_add", None),
    "OneHot": ("one_hot", "input classes on off"),
    "OneHotExt": ("one_hot", None),
    "TopkExt": ("topk", None),
    "SortExt": ("sort", None),
    "ArgSort": ("argsort", None),
    "Kthvalue": ("kthvalue", None),
    "SearchSorted": ("searchsorted", None),
    "BincountExt": ("bincount", None),
    "HistcExt": ("histc", "input bins min max"),
    "Sort": ("sort", "input dim"),
    "NonZero": ("nonzero", None),
    "NonZeroExt": ("nonzero_tuple", None),
    "MaskedSelect": ("masked_select", None),
    "FuncDropoutExt": ("dropout", None),
    "DropoutExt": ("dropout_pair", None),
    "BernoulliExt": ("bernoulli", None),
    "MultinomialExt": ("multinomial", None),
    "RandLikeExt": ("rand_like", None),
    "RandnLike": ("randn_like", None),
    "RandIntLike": ("randint_like", None),
    "ZerosLike ZerosLikeExt": ("zeros_like", None),
    "OnesLike OnesLikeExt": ("ones_like", None),
    "EmptyLike": ("empty_like", None),
    "FullLike": ("full_like", None),
    "NewZeros": ("new_zeros", "input shape"),
    "NewOnes": ("new_ones", "input shape"),
    "NewEmpty": ("new_empty", "input shape"),
    "NewFull": ("new_full", None),
    "InplaceCopy": ("copy_", None),
    "InplaceZero": ("zero_", None),
    "InplaceFillScalar InplaceFillTensor": ("fill_", None),
    "InplaceAddExt InplaceAddsExt": ("add_", "input other alpha"),
    "InplaceSubExt InplaceSubScalar": ("sub_", "input other alpha"),
    "InplaceMul InplaceMuls": ("mul_", "input other"),
    "InplaceDiv InplaceDivs": ("div_", "input other"),
    "InplaceMaskedFillScalar InplaceMaskedFillTensor": ("masked_fill_", "input mask value"),
    "InplaceDivMod InplaceDivMods": ("div_", "input other rounding_mode"),
    "InplaceFloorDivide InplaceFloorDivides": ("floor_divide_", "input other"),
    "InplaceRemainderTensorTensor InplaceRemainderTensorScalar": ("remainder_", "input other"),
    "InplaceClampScalar InplaceClampTensor": ("clamp_", "input min max"),
    "InplaceScatterSrc InplaceScatterValue": ("scatter_", "input dim index src"),
    "InplaceScatterAdd": ("scatter_add_", "input dim index src"),
    "InplaceIndexAddExt": ("index_add_", "input dim index source alpha"),
    "InplaceNormal": ("normal_", None),
    "InplaceUniform": ("uniform_", None),
    "InplaceExponential": ("exponential_", None),
    "InplaceRandom": ("random_", None),
    "InplaceBernoulliScalar InplaceBernoulliTensor": ("bernoulli_", None),
    "getitem": ("getitem", None),
    "setitem_": ("setitem_", None),
    "read": ("read", None),
}
"""`names: (canonical name, positional arguments where they are not those of the rule)`."""

_SAME_NAMES = {f"{name} {name}Ext": (name.lower(), None) for name in _POINTWISE.split()}
_SAME_NAMES |= {f"Inplace{name}": (f"{name.lower()}_", "input") for name in _OVERWRITING.split()}
_SAME_NAMES |= {f"Deprecated{name}": (name.lower(), None) for name in _METHODS.split()}

OPERATORS: Mapping[str, Operator] = {
    name: known_as(op, parameters)
    for names, (op, parameters) in (_SAME_NAMES | _NAMES).items()
    for name in names.split()
}
"""What each operator is."""

QUERIES = frozenset(("typeof", "make_range", "Shape", "Rank", "DType", "Size"))
"""Operators that look at no element of a tensor."""


def canonical(function: Any, args: tuple, kwargs: Mapping[str, Any]) -> tuple[Hashable, dict[str, Any]] | None:
    """The canonical name of an operator that was called, and its arguments by canonical name.

    `function` is what MindSpore hands to an interception, or a name. None for what reads no element, such as a shape.
    An operator that nothing is known of goes by its own name.
    """
    name = function if isinstance(function, str) else function.name
    if len(args) == 3 and isinstance(args[0], ms.ops.Primitive) and args[1] == name:  # how primitives are run
        args = (*args[2], *_attributes(args[0], name))
    if name in QUERIES:
        return None
    if (special := _SPECIAL.get(name)) is not None:
        parameters, normalise = special
        return normalise(bind(parameters, args, kwargs))
    if (known := OPERATORS.get(name)) is not None:
        return known.op, bind(known.parameters, args, kwargs)
    return name, bind(parameters_of(name) or "", args, kwargs)


def _attributes(primitive: ms.ops.Primitive, name: str) -> tuple:
    """What a primitive keeps as attributes and the rules ask for."""
    return tuple(getattr(primitive, each) for each in _KEPT.get(name, ()))


_KEPT = {"Stack": ("axis",), "PadV3": ("mode",), "Tril": ("diagonal",), "Triu": ("diagonal",), "Sort": ("axis",)}


Given = dict[str, Any]


def _matrix_product(given: Given) -> tuple[str, Given]:
    """Either side may be transposed."""
    return "matmul_transposed", given


_INTEGERS = range(30, 41)
"""Numbers of the dtypes of truth values and whole numbers, in MindSpore's own count."""


def _cast(given: Given) -> tuple[str, Given]:
    """To a dtype, or to what has its number."""
    if isinstance(given.get("dtype"), int):
        return ("truncate" if given["dtype"] in _INTEGERS else "cast"), {"input": given["input"]}
    return "cast", given


def _strided_slice(given: Given) -> tuple[str, Given]:
    """Without masks this is an index."""
    if any(given.get("masks", ())):
        return "StridedSlice with masks", given
    slices = map(slice, given["begin"], given["end"], given["strides"])
    return "getitem", {"input": given["input"], "index": tuple(slices)}


def _slice(given: Given) -> tuple[str, Given]:
    """Where it begins and how much it takes of each dim."""
    ends = (None if size == -1 else begin + size for begin, size in zip(given["begin"], given["size"]))
    return "getitem", {"input": given["input"], "index": tuple(map(slice, given["begin"], ends))}


def _dropout(given: Given) -> tuple[str, Given]:
    """By the chance to be kept."""
    return "dropout_pair", {"input": given["input"], "p": 1.0 - given["kept"]}


def _softmax(given: Given) -> tuple[str, Given]:
    """The dim may stand in a tuple."""
    dim = given.get("dim", -1)
    return "softmax", given | {"dim": dim[0] if isinstance(dim, (tuple, list)) else dim}


def _layer_norm(given: Given) -> tuple[str, Given]:
    """By the sizes of the dims that it works on; statistics are results too."""
    return "layer_norm_from", {"begin": -len(given.pop("shape"))} | given


def _index(given: Given) -> tuple[str, Given]:
    return "getitem", given | {"index": tuple(given["index"])}


def _index_put(given: Given) -> tuple[str, Given]:
    return "setitem_", given | {"index": tuple(given["index"])}


def _scattered(given: Given) -> tuple[str, Given]:
    """The last argument tells a sum from an assignment."""
    return ("scatter_add" if given.pop("reduction") else "scatter"), given


def _top(given: Given) -> tuple[str, Given]:
    """Always along the last dim."""
    return "topk", given | {"dim": -1}


_SPECIAL: Mapping[str, tuple[str, Callable[[Given], tuple[str, Given]]]] = {
    "MatMul": ("input other transpose_input transpose_other", _matrix_product),
    "BatchMatMul": ("input other transpose_input transpose_other", _matrix_product),
    "Cast": ("input dtype", _cast),
    "ToDtype": ("input dtype", _cast),
    "ToDevice": ("input device dtype", _cast),
    "StridedSlice": ("input begin end strides *masks", _strided_slice),
    "Slice": ("input begin size", _slice),
    "Dropout": ("input kept", _dropout),
    "Softmax": ("input dim", _softmax),
    "LayerNormExt": ("input shape weight bias", _layer_norm),
    "Index": ("input index", _index),
    "InplaceIndexPut": ("input index value accumulate", _index_put),
    "TensorScatterElements": ("input index src dim reduction", _scattered),
    "TopK": ("input k", _top),
}
"""Operators whose arguments mean something else than the rules' do: their names, and what becomes of them."""
