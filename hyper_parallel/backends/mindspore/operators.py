"""MindSpore's operators by the canonical names that the layout rules know them by.

MindSpore names what runs below its functions: `x + y` and `mint.add(x, y)` are both "AddExt". What it does not tell of
goes by a name of ours: an index is "getitem" or "setitem_".
"""

from __future__ import annotations

from typing import Any, Callable, Hashable, Mapping, NamedTuple

import mindspore as ms

from hyper_parallel.core.rules.call import Slice, bind
from hyper_parallel.core.rules.table import parameters_of


class Operator(NamedTuple):
    """A canonical name, and the canonical names of an operator's positional arguments; see `bind`."""

    op: str
    parameters: str


_POINTWISE = (
    "Abs ACos ASin Atan Acosh Asinh Atanh Ceil Cos Cosh Erf Erfc Erfinv Exp Exp2 Expm1 Floor Frac GeLU HSigmoid HSwish "
    "Hardtanh LeakyReLU LeakyReLUExt Elu EluExt Log Log10 Log1p Log2 LogSigmoid LogSigmoidExt Mish NanToNum Reciprocal "
    "ReLU ReLU6 Round Rsqrt SeLU SeLUExt Sigmoid Sign SiLU Sin Sinh Softplus SoftplusExt Softsign Sqrt Square Tan Tanh "
    "Trunc Xlogy Atan2 Mod FloorMod RemainderTensorTensor RemainderTensorScalar FloorDiv Pow PowTensorScalar "
    "PowScalarTensor Maximum Minimum Polar ClampScalar ClampTensor Addcmul Addcdiv GeLUExt Gelu FastGeLU"
)
_TESTS = (
    "Equal NotEqual Greater GreaterEqual Less LessEqual LogicalAnd LogicalOr LogicalXor LogicalNot BitwiseAnd "
    "BitwiseOr BitwiseXor BitwiseNot IsFinite IsInf IsNan GreaterEqualScalar EqualScalar NotEqualScalar"
)

_NAMES: dict[str, tuple[str, str | None]] = {
    _POINTWISE: ("pointwise", None),
    _TESTS: ("logical_and", None),
    "Add AddN AddExt AddScalar": ("add", "input other alpha"),
    "Sub SubExt SubScalar": ("sub", "input other alpha"),
    "Mul Muls": ("mul", None),
    "Div Divs RealDiv DivMod": ("div", "input other rounding_mode"),
    "DivNoNan": ("pointwise", None),
    "Neg": ("neg", None),
    "Real Imag Conj": ("identity", None),
    "Cast ToDtype ToOther": ("cast", None),
    "Contiguous Identity Copy Clone CellBackwardHook ToDevice Depend": ("identity", None),
    "StopGradient": ("detach", None),
    "Select": ("where", None),
    "MaskedFill MaskedFillScalar": ("masked_fill", None),
    "Lerp LerpScalar": ("lerp", None),
    "BiasAdd": ("bias_add", None),
    "Dense": ("linear", None),
    "MatMulExt BatchMatMulExt Mm Mv DotExt": ("matmul", None),
    "Outer": ("outer", None),
    "Einsum": ("einsum", None),
    "Addmm Baddbmm": ("addmm", "input left right beta alpha"),
    "SumExt ReduceSum": ("sum", None),
    "MeanExt ReduceMean": ("mean", None),
    "ReduceMax ReduceMin ReduceProd ProdExt Std Var ReduceStd LogSumExp": ("amax", None),
    "Norm LpNorm LpNormV2": ("norm", "input p dim keepdim"),
    "Max MaxDim": ("max", None),
    "Min MinDim": ("min", None),
    "ReduceAll ReduceAny AllExt AnyExt Argmax ArgMaxExt Argmin ArgMinExt CountNonZero": ("any", None),
    "CumSum CumsumExt": ("cumsum", None),
    "CumProd": ("cumprod", None),
    "Cummax": ("cummax", None),
    "Cummin": ("cummin", None),
    "Softmax": ("softmax", None),
    "LogSoftmax LogSoftmaxExt": ("log_softmax", None),
    "LayerNorm": ("layer_norm_from", "input weight bias begin begin_of_weights epsilon"),
    "LayerNormExt": ("layer_norm", None),
    "RmsNorm": ("rms_norm_pair", "input weight"),
    "GLU": ("glu", None),
    "Reshape View": ("reshape", "input shape"),
    "FlattenExt": ("flatten", None),
    "Transpose TransposeView": ("permute", "input dims"),
    "TransposeExt TransposeExtView": ("transpose", None),
    "TExt": ("transpose_last", None),
    "ExpandDims ExpandDimsView": ("unsqueeze", None),
    "Squeeze": ("squeeze", "input dim"),
    "BroadcastTo BroadcastToView ExpandView": ("expand", "input shape"),
    "ExpandAs": ("expand_as", None),
    "Tile": ("repeat", "input repeats"),
    "RepeatInterleaveInt RepeatInterleaveTensor": ("repeat_interleave", None),
    "SplitTensor SplitTensorView SplitWithSize SplitWithSizeView": ("split", None),
    "Chunk ChunkView": ("chunk", None),
    "UnstackExt UnstackExtView": ("unbind", None),
    "SelectExt SelectExtView": ("select", None),
    "Narrow NarrowView": ("narrow", None),
    "Slice SliceExt": ("slice", "input dim start stop step"),
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

OPERATORS: Mapping[str, Operator] = {
    name: Operator(op, parameters if parameters is not None else parameters_of(op) or "")
    for names, (op, parameters) in _NAMES.items()
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


def _split_in(args: tuple) -> tuple[str, dict]:
    """`Split`, which is given the number of parts."""
    return "chunk", bind("input dim chunks", args, {})


def _strided_slice(args: tuple) -> tuple[str, dict]:
    """`StridedSlice` without masks is an index."""
    tensor, begin, end, strides, *masks = args
    if any(masks):
        return "StridedSlice with masks", {"input": tensor}
    return "getitem", {"input": tensor, "index": tuple(map(Slice, begin, end, strides))}


def _dropout(args: tuple) -> tuple[str, dict]:
    """`Dropout` is given what is kept, and returns the mask too."""
    return "dropout_pair", {"input": args[0], "p": 1.0 - args[1]}


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
    "Split": _split_in,
    "StridedSlice": _strided_slice,
    "Dropout": _dropout,
    "Stack": _stack,
    "PadV3": _pad,
    "TensorScatterElements": _scattered,
    "TopK": _top,
}
"""Operators whose arguments mean something else than the rules' do."""
