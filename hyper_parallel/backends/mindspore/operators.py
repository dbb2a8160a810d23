"""MindSpore's operators by the canonical names that the layout rules know them by.

MindSpore names what runs below its functions: `x + y` and `mint.add(x, y)` are both "AddExt". What it does not tell of
goes by a name of ours: an index is "getitem" or "setitem_".
"""

from __future__ import annotations

from typing import Any, Callable, Hashable, Mapping, NamedTuple

import mindspore as ms

from hyper_parallel.core.rules.call import bind
from hyper_parallel.core.rules.table import parameters_of


class Operator(NamedTuple):
    """A canonical name, and the canonical names of an operator's positional arguments; see `bind`."""

    op: str
    parameters: str


_POINTWISE = (
    "Abs ACos ASin Atan Ceil Cos Cosh Erf Erfc Exp Exp2 Expm1 Floor Frac GeLU Hardtanh Elu Log Log10 Log1p "
    "Log2 LogSigmoid Mish Reciprocal ReLU ReLU6 Round Rsqrt SeLU Sigmoid Sign SiLU Sin Sinh Softplus Softsign Sqrt "
    "Square Tan Tanh Trunc Xlogy Atan2 Pow Maximum Minimum Polar Addcmul Addcdiv"
)
"""Operators that the rules know by the same name in small letters, and whose newer form ends with "Ext"."""

_METHODS = (
    "Acos Add Argmax Argmin Argsort Asin Atan Chunk Cumsum Dot Frac Imag Logsumexp Matmul Max Mean Median Min Mul Pow "
    "Prod Real Squeeze Std Sub Sum Tril Topk Unsqueeze Var Xlogy"
)
"""Methods of tensors whose former arguments still work: as "Deprecated", and else as the rules have them."""

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
    "Acosh Asinh Atanh Erfinv FastGeLU Gelu HSigmoid HSwish NanToNum DivNoNan": ("pointwise", None),
    "LeakyReLU LeakyReLUExt": ("leaky_relu", None),
    "Mod FloorMod RemainderTensorTensor RemainderTensorScalar": ("remainder", None),
    "FloorDiv": ("floor_divide", None),
    "PowTensorScalar PowScalarTensor": ("pow", None),
    "ClampScalar ClampTensor": ("clamp", None),
    "Equal EqualScalar": ("eq", None),
    "NotEqual NotEqualScalar": ("ne", None),
    "Greater GreaterScalar": ("gt", None),
    "GreaterEqual GreaterEqualScalar": ("ge", None),
    "Less LessScalar": ("lt", None),
    "LessEqual LessEqualScalar": ("le", None),
    "LogicalAnd": ("logical_and", None),
    "LogicalOr": ("logical_or", None),
    "LogicalXor": ("logical_xor", None),
    "LogicalNot": ("logical_not", None),
    "BitwiseAnd": ("bitwise_and", None),
    "BitwiseOr": ("bitwise_or", None),
    "BitwiseXor": ("bitwise_xor", None),
    "BitwiseNot": ("bitwise_not", None),
    "IsFinite": ("isfinite", None),
    "IsInf": ("isinf", None),
    "IsNan": ("isnan", None),
    "Add AddN AddExt AddScalar": ("add", "input other alpha"),
    "Sub SubExt SubScalar": ("sub", "input other alpha"),
    "Mul Muls": ("mul", None),
    "Div Divs RealDiv DivMod": ("div", "input other rounding_mode"),
    "DivNoNan": ("pointwise", None),
    "Neg": ("neg", None),
    "Real Imag Conj": ("identity", None),
    "ToOther": ("type_as", None),
    "Contiguous Identity Copy Clone CellBackwardHook ToDevice Depend": ("identity", None),
    "StopGradient": ("detach", None),
    "Select": ("where", None),
    "MaskedFill MaskedFillScalar": ("masked_fill", None),
    "Lerp LerpScalar": ("lerp", None),
    "BiasAdd": ("bias_add", None),
    "Dense": ("linear", None),
    "All": ("all", None),
    "Any": ("any", None),
    "MatMulExt BatchMatMulExt Mm Mv DotExt": ("matmul", None),
    "Outer": ("outer", None),
    "Einsum": ("einsum", None),
    "Addmm Baddbmm": ("addmm", "input left right beta alpha"),
    "SumExt ReduceSum": ("sum", None),
    "MeanExt ReduceMean": ("mean", None),
    "ReduceMax": ("amax", None),
    "ReduceMin": ("amin", None),
    "ReduceProd ProdExt": ("prod", None),
    "Std": ("std", "input dim correction keepdim"),
    "ReduceStd": ("std_mean", None),
    "Var": ("var", "input dim correction keepdim"),
    "LogSumExp": ("logsumexp", None),
    "Norm LpNorm LpNormV2": ("norm", "input p dim keepdim"),
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
    "Cummin": ("cummin", None),
    "LogSoftmax LogSoftmaxExt": ("log_softmax", None),
    "LayerNorm": ("layer_norm_from", "input weight bias begin begin_of_weights epsilon"),
    "LayerNormExt": ("layer_norm", None),
    "RmsNorm": ("rms_norm_from", None),
    "GLU": ("glu", None),
    "Reshape View": ("reshape", "input *shape"),
    "FlattenExt": ("flatten", None),
    "Transpose TransposeView": ("permute", "input *dims"),
    "TransposeExt TransposeExtView": ("transpose", None),
    "TExt": ("transpose_last", None),
    "ExpandDims ExpandDimsView": ("unsqueeze", None),
    "Squeeze": ("squeeze", "input dim"),
    "BroadcastTo BroadcastToView ExpandView": ("expand", "input *shape"),
    "ExpandAs": ("expand_as", None),
    "Tile": ("repeat", "input *repeats"),
    "RepeatInterleaveInt RepeatInterleaveTensor": ("repeat_interleave", None),
    "SplitTensor SplitTensorView SplitWithSize SplitWithSizeView": ("split", None),
    "Chunk ChunkView": ("chunk", None),
    "UnstackExt UnstackExtView": ("unbind", None),
    "SelectExt SelectExtView": ("select", None),
    "Narrow NarrowView": ("narrow", None),
    "SliceExt SliceExtView": ("slice", None),
    "Concat": ("cat", None),
    "StackExt": ("stack", None),
    "Roll": ("roll", None),
    "ReverseV2": ("flip", "input dims"),
    "TrilExt Tril": ("tril", None),
    "TriuExt Triu": ("triu", None),
    "ConstantPadND": ("pad", "input pad value"),
    "Gather": ("take_rows", "input index dim batch_dims"),
    "IndexSelect": ("index_select", None),
    "Embedding": ("embedding", None),
    "GatherD": ("gather", None),
    "Scatter": ("scatter", None),
    "ScatterAddExt": ("scatter_add", None),
    "IndexAddExt": ("index_add", None),
    "OneHot": ("one_hot", "input classes on off"),
    "OneHotExt": ("one_hot", None),
    "TopkExt": ("topk", None),
    "SortExt": ("sort", None),
    "Sort": ("sort", "input dim"),
    "NonZero": ("nonzero", None),
    "NonZeroExt": ("nonzero_tuple", None),
    "MaskedSelect": ("masked_select", None),
    "ScaledDotProductAttention": ("attention", None),
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
    "getitem": ("getitem", None),
    "setitem_": ("setitem_", None),
    "read": ("read", None),
}
"""`names: (canonical name, positional arguments where they are not those of the rule)`."""

_SAME_NAMES = {f"{name} {name}Ext": (name.lower(), None) for name in _POINTWISE.split()}
_SAME_NAMES |= {f"Deprecated{name}": (name.lower(), None) for name in _METHODS.split()}

OPERATORS: Mapping[str, Operator] = {
    name: Operator(op, parameters if parameters is not None else parameters_of(op) or "")
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
        return special(args)
    if (known := OPERATORS.get(name)) is not None:
        return known.op, bind(known.parameters, args, kwargs)
    return name, bind(parameters_of(name) or "", args, kwargs)


def _attributes(primitive: ms.ops.Primitive, name: str) -> tuple:
    """What a primitive keeps as attributes and the rules ask for."""
    return tuple(getattr(primitive, each) for each in _KEPT.get(name, ()))


_KEPT = {"Stack": ("axis",), "PadV3": ("mode",), "Tril": ("diagonal",), "Triu": ("diagonal",), "Sort": ("axis",)}


def _matrix_product(args: tuple) -> tuple[str, dict]:
    """`MatMul` and `BatchMatMul`, either side of which may be transposed."""
    left, right, transpose_left, transpose_right = (*args, False, False)[:4]
    given = {"input": left, "other": right, "transpose_input": transpose_left, "transpose_other": transpose_right}
    return "matmul_transposed", given


_INTEGERS = range(30, 41)
"""Numbers of the dtypes of truth values and whole numbers, in MindSpore's own count."""


def _cast(args: tuple) -> tuple[str, dict]:
    """`Cast` and `ToDtype` are given a dtype or its number."""
    if isinstance(args[1], int):
        return ("truncate" if args[1] in _INTEGERS else "cast"), {"input": args[0]}
    return "cast", {"input": args[0], "dtype": args[1]}


def _split_in(args: tuple) -> tuple[str, dict]:
    """`Split`, which is given the number of parts."""
    return "chunk", bind("input dim chunks", args, {})


def _strided_slice(args: tuple) -> tuple[str, dict]:
    """`StridedSlice` without masks is an index."""
    tensor, begin, end, strides, *masks = args
    if any(masks):
        return "StridedSlice with masks", {"input": tensor}
    return "getitem", {"input": tensor, "index": tuple(map(slice, begin, end, strides))}


def _dropout(args: tuple) -> tuple[str, dict]:
    """`Dropout` is given what is kept, and returns the mask too."""
    return "dropout_pair", {"input": args[0], "p": 1.0 - args[1]}


def _softmax(args: tuple) -> tuple[str, dict]:
    """`Softmax`, whose dim may stand in a tuple."""
    dim = args[1] if len(args) > 1 else -1
    return "softmax", {"input": args[0], "dim": dim[0] if isinstance(dim, (tuple, list)) else dim}


def _stack(args: tuple) -> tuple[str, dict]:
    return "stack", bind("tensors dim", args, {})


def _pad(args: tuple) -> tuple[str, dict]:
    return "pad", bind("input pad value mode", args, {})


def _scattered(args: tuple) -> tuple[str, dict]:
    """`TensorScatterElements`: the last argument tells a sum from an assignment."""
    tensor, index, source, dim, reduction = args
    return ("scatter_add" if reduction else "scatter"), {"input": tensor, "dim": dim, "index": index, "src": source}


def _top(args: tuple) -> tuple[str, dict]:
    return "topk", {"input": args[0], "k": args[1], "dim": -1}


_SPECIAL: Mapping[str, Callable[[tuple], tuple[str, dict]]] = {
    "MatMul": _matrix_product,
    "BatchMatMul": _matrix_product,
    "Cast": _cast,
    "ToDtype": _cast,
    "Split": _split_in,
    "StridedSlice": _strided_slice,
    "Dropout": _dropout,
    "Softmax": _softmax,
    "Stack": _stack,
    "PadV3": _pad,
    "TensorScatterElements": _scattered,
    "TopK": _top,
}
"""Operators whose arguments mean something else than the rules' do."""
