"""PyTorch's functions by the canonical names that the layout rules know them by."""

from __future__ import annotations

from typing import Any, Callable, Hashable, Iterator, Mapping

import torch
from torch.nn import functional as F
from torch.overrides import resolve_name

from hyper_parallel.core.rules.call import bind
from hyper_parallel.core.rules.table import Operator, known_as, parameters_of

_HOMES = (torch.Tensor, torch, F, torch.special, torch.linalg)
"""Where a function of a given name may stand; `name_` and `__name__` are looked for beside it."""

_ALIKE = (
    "abs acos asin atan ceil celu cos cosh elu erf erfc exp exp2 expm1 floor frac gelu hardsigmoid hardswish hardtanh "
    "leaky_relu log log10 log1p log2 logit logsigmoid mish nan_to_num reciprocal relu relu6 round rsqrt selu sigmoid "
    "sign silu sin sinh softplus softsign sqrt square tan tanh threshold trunc xlogy addcmul addcdiv lerp "
    "atan2 bitwise_and bitwise_or bitwise_xor fmod maximum minimum polar pow remainder rsub "
    "eq ge gt le lt ne isclose logical_and logical_or logical_xor bitwise_not isfinite isinf isnan logical_not "
    "neg real imag conj type_as detach add sub mul masked_fill outer einsum "
    "sum mean amax amin logsumexp prod count_nonzero argmax argmin all any median cumsum cumprod cummax cummin "
    "logcumsumexp softmax log_softmax softmin gumbel_softmax layer_norm rms_norm glu "
    "view_as reshape_as flatten permute transpose movedim unsqueeze squeeze expand_as "
    "view_as_complex view_as_real diagonal tensor_split unbind select narrow stack roll flip tril triu pad "
    "index_select gather scatter_add bincount kthvalue argsort masked_select "
    "dropout alpha_dropout dropout1d dropout2d dropout3d feature_dropout feature_alpha_dropout bernoulli "
    "zeros_like ones_like empty_like rand_like randn_like randint_like "
    "new_zeros new_ones new_empty new_tensor diff complex "
    "zero_ fill_ copy_ uniform_ normal_ exponential_ random_"
)
"""Functions that are called as the rules call them, arguments included."""

_RENAMED: dict[str, tuple[str, str | None]] = {
    "absolute": ("abs", None),
    "arccos arcsin arctan": ("pointwise", None),
    "clamp clip": ("clamp", "input min max"),
    "concat concatenate cat": ("cat", "tensors dim"),
    "contiguous clone alias cpu cuda resolve_conj resolve_neg requires_grad_ dequantize": ("identity", None),
    "to type float half double bfloat16": ("cast", None),
    "long int bool short byte char": ("truncate", "input"),
    "greater": ("gt", None),
    "greater_equal": ("ge", None),
    "less": ("lt", None),
    "less_equal": ("le", None),
    "not_equal": ("ne", None),
    "negative": ("neg", None),
    "subtract": ("sub", None),
    "multiply": ("mul", None),
    "div divide true_divide": ("div", None),
    "floor_divide": ("floor_divide", None),
    "matmul bmm mm mv dot": ("matmul", "input other|mat2|vec2|vec|tensor"),
    "linear": ("linear", None),
    "addmm baddbmm": ("addmm", "input left|mat1|batch1 right|mat2|batch2 beta alpha"),
    "ger": ("outer", "input other|vec2"),
    "conv1d": ("conv1d", None),
    "solve_triangular": ("solve_triangular", "matrix|A right|B"),
    "grouped_mm _grouped_mm": ("grouped_mm", "input|self|mat_a weight|mat2|mat_b offs bias"),
    "norm vector_norm": ("norm", "input|x|A p|ord dim keepdim"),
    "normalize": ("normalize", "input p dim"),
    "group_norm": ("group_norm", "input groups|num_groups weight bias"),
    "cross_entropy": (
        "cross_entropy",
        "input target weight size_average ignore_index reduce reduction label_smoothing",
    ),
    "nll_loss": ("nll_loss", "input target weight size_average ignore_index reduce reduction"),
    "reshape": ("reshape", "input *shape"),
    "view": ("reshape", "input *shape|size"),
    "unflatten": ("unflatten", None),
    "swapaxes swapdims": ("transpose", "input dim0|axis0 dim1|axis1"),
    "moveaxis": ("movedim", None),
    "t": ("transpose_last", None),
    "expand broadcast_to": ("expand", "input *shape|size"),
    "repeat tile": ("repeat", "input *repeats|sizes|dims"),
    "repeat_interleave": ("repeat_interleave", None),
    "split split_with_sizes": ("split", "input|tensor size|split_size_or_sections|split_size|split_sizes dim"),
    "chunk": ("chunk", None),
    "unfold": ("unfold", None),
    "embedding": ("embedding", None),
    "take_along_dim": ("take_along_dim", "input index|indices dim"),
    "scatter": ("scatter", "input dim index src|value reduce"),
    "index_add": ("index_add", "input dim index source alpha"),
    "one_hot": ("one_hot", "input|tensor classes|num_classes"),
    "histc": ("histc", "input bins min max"),
    "topk": ("topk", "input k dim largest sorted"),
    "sort": ("sort", "input dim descending stable"),
    "unique": ("unique", None),
    "searchsorted": ("searchsorted", "sorted|sorted_sequence input"),
    "bucketize": ("searchsorted", "input sorted|boundaries"),
    "scaled_dot_product_attention": (
        "attention",
        "query key value mask|attn_mask dropout|dropout_p causal|is_causal scale grouped|enable_gqa",
    ),
    "full_like": ("full_like", "input value|fill_value"),
    "new_full": ("new_full", "input shape|size value|fill_value"),
    "item tolist numpy equal allclose": ("read", "input other"),
    "multinomial": ("multinomial", "input count|num_samples"),
}
"""`names: (canonical name, positional arguments where they are not those of the rule)`."""

_SPECIAL: dict[str, tuple[str, str | None]] = {
    "add radd": ("add", None),
    "iadd": ("add_", "input other"),
    "sub": ("sub", None),
    "isub": ("sub_", "input other"),
    "rsub": ("rsub", None),
    "mul rmul": ("mul", None),
    "imul": ("mul_", "input other"),
    "truediv div": ("div", None),
    "itruediv idiv": ("div_", "input other"),
    "rtruediv rdiv": ("rdiv", None),
    "floordiv": ("floor_divide", None),
    "ifloordiv": ("floor_divide_", "input other"),
    "mod": ("remainder", None),
    "pow": ("pow", None),
    "ipow": ("pow_", "input other"),
    "rpow rfloordiv rmod": ("rpow", None),
    "matmul": ("matmul", None),
    "rmatmul": ("matmul", "other input"),
    "and rand": ("bitwise_and", None),
    "or ror": ("bitwise_or", None),
    "xor rxor": ("bitwise_xor", None),
    "iand": ("bitwise_and_", "input other"),
    "ior": ("bitwise_or_", "input other"),
    "ixor": ("bitwise_xor_", "input other"),
    "invert": ("bitwise_not", None),
    "neg": ("neg", None),
    "abs": ("abs", None),
    "eq": ("eq", None),
    "ne": ("ne", None),
    "lt": ("lt", None),
    "le": ("le", None),
    "gt": ("gt", None),
    "ge": ("ge", None),
    "getitem": ("getitem", None),
    "setitem": ("setitem_", None),
    "bool float int index complex contains array": ("read", None),
}
"""The same for what Python's operators call: the names stand between underscores."""

_ATTRIBUTES = {"T": "transpose_all", "mT": "transpose_last", "H": "transpose_all", "mH": "transpose_last"}
_ATTRIBUTES |= {"real": "real", "imag": "imag", "data": "detach"}

_ASKED = (
    "size dim numel nelement ndimension stride storage_offset element_size is_contiguous is_floating_point is_complex "
    "is_signed is_conj is_neg data_ptr untyped_storage get_device __len__ __hash__ __repr__ __format__ result_type "
    "is_tensor is_shared is_pinned is_inference retain_grad register_hook has_names dim_order __reduce_ex__"
)
_ASKED_ATTRIBUTES = (
    "shape dtype device ndim requires_grad is_leaf grad_fn is_cuda is_meta layout itemsize nbytes names grad is_sparse "
    "is_quantized is_nested is_cpu is_mps is_xpu is_mkldnn _version output_nr _base retains_grad"
)


def canonical(function: Callable, args: tuple, kwargs: Mapping[str, Any]) -> tuple[Hashable, dict[str, Any]] | None:
    """The canonical name of a function that was called, and its arguments by canonical name.

    None for what reads no element, such as a shape. A function that nothing is known of goes by its own name, or, where
    a rule has been registered for it, by what it was registered as.
    """
    if function in QUERIES:
        return None
    if (overloaded := _OVERLOADED.get(function)) is not None:
        return overloaded(args, kwargs)
    if (known := OPERATORS.get(function)) is not None:
        return known.op, bind(known.parameters, args, kwargs)
    name = _name(function)
    packet = getattr(function, "overloadpacket", function)  # what is called as torch.ops.library.name
    for operator in (function, name, packet, _name(packet)):
        if (parameters := parameters_of(operator)) is not None:
            return operator, bind(parameters, args, kwargs)
    return name, bind("", args, kwargs)


def _name(function: Callable) -> str:
    return resolve_name(function) or getattr(function, "__name__", repr(function))


def _extreme(op: str, pairwise: str) -> Callable[[tuple, Mapping], tuple[str, dict]]:
    """`max` and `min`: of two tensors, along a dim, or of all elements."""

    def normalise(args: tuple, kwargs: Mapping) -> tuple[str, dict]:
        second = args[1] if len(args) > 1 else kwargs.get("other")
        if isinstance(second, torch.Tensor):
            return pairwise, bind("input other", args, kwargs)
        return op, bind("input dim keepdim", args, kwargs)

    return normalise


def _where(args: tuple, kwargs: Mapping) -> tuple[str, dict]:
    given = bind("condition input|self other", args, kwargs)
    return ("where", given) if len(given) > 1 else ("nonzero_tuple", {"input": given["condition"]})


def _where_method(args: tuple, kwargs: Mapping) -> tuple[str, dict]:
    """`x.where(condition, other)`."""
    return "where", bind("input condition other", args, kwargs)


def _nonzero(args: tuple, kwargs: Mapping) -> tuple[str, dict]:
    return ("nonzero_tuple" if kwargs.get("as_tuple") else "nonzero"), {"input": args[0] if args else kwargs["input"]}


def _deviation(op: str) -> Callable[[tuple, Mapping], tuple[str, dict]]:
    """`std` and `var`: a truth value in the place of the dim says how to divide."""

    def normalise(args: tuple, kwargs: Mapping) -> tuple[str, dict]:
        given = bind("input dim correction keepdim", args, kwargs)
        return op, given | ({"dim": None} if isinstance(given.get("dim"), bool) else {})

    return normalise


def _functions(names: str, pattern: str, homes: tuple = (torch.Tensor,)) -> Iterator[Callable]:
    """Every function that goes by one of the names, put into the pattern, wherever it stands."""
    for name in names.split():
        for home in homes:
            if callable(function := getattr(home, pattern.format(name), None)):
                yield function


def _operators() -> dict[Callable, Operator]:
    table = {}
    for names, (op, parameters) in ({name: (name, None) for name in _ALIKE.split()} | _RENAMED).items():
        named = known_as(op, parameters)
        table |= dict.fromkeys(_functions(names, "{}", _HOMES), named)
        table |= dict.fromkeys(_functions(names, "{}_", _HOMES), named._replace(op=f"{op}_"))
    for names, (op, parameters) in _SPECIAL.items():
        named = known_as(op, parameters)
        table |= dict.fromkeys(_functions(names, "__{}__"), named)
    for name, op in _ATTRIBUTES.items():
        table[getattr(torch.Tensor, name).__get__] = Operator(op, "input")
    return table


OPERATORS: Mapping[Callable, Operator] = _operators()
"""What each function is."""

_OVERLOADED: Mapping[Callable, Callable[[tuple, Mapping], tuple[str, dict]]] = {
    torch.max: _extreme("max", "maximum"),
    torch.Tensor.max: _extreme("max", "maximum"),
    torch.min: _extreme("min", "minimum"),
    torch.Tensor.min: _extreme("min", "minimum"),
    torch.where: _where,
    torch.Tensor.where: _where_method,
    torch.nonzero: _nonzero,
    torch.Tensor.nonzero: _nonzero,
    **dict.fromkeys(_functions("std", "{}", _HOMES), _deviation("std")),
    **dict.fromkeys(_functions("var", "{}", _HOMES), _deviation("var")),
}
"""Functions that do one thing or another, by what they are given."""

QUERIES: frozenset[Callable] = frozenset(
    [*_functions(_ASKED, "{}", (torch.Tensor, torch))]
    + [
        descriptor.__get__
        for name in _ASKED_ATTRIBUTES.split()
        if (descriptor := getattr(torch.Tensor, name, None)) is not None
    ]
)
"""Functions that look at no element of a tensor."""
