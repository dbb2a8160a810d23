"""How parameters are laid out: each form checks a shape against what the rule claims and says what the dims mean."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, Callable, Iterable, NamedTuple

from hyper_parallel.core.plan.architectures import (
    FUSED_ATTENTION,
    FUSED_GATES,
    PACKED_EXPERTS,
    FusedAttention,
    PackedExperts,
)
from hyper_parallel.core.plan.model import ParameterDescription
from hyper_parallel.core.plan.names import Name
from hyper_parallel.core.plan.role_rules import LINEAR_CLASSES, TRANSPOSED_CLASSES, Rule
from hyper_parallel.core.plan.sizes import Contradiction, Path, Size, Sizes

ROUTER_CLASSES = ("*Router", "*Gate")


class Match(NamedTuple):
    """A rule and the parameter that it matched.

    `anchor` is the logical path of the first module that the pattern names, `owner` the class of the parameter's own
    module, `holder` that of the module around it.
    """

    rule: Rule
    name: Name
    parameter: ParameterDescription
    anchor: Path
    owner: str
    holder: str
    sizes: Sizes

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape."""
        return self.parameter.shape


Fields = dict[str, Any]


def linear(match: Match) -> Fields:
    """A weight [out, in], or [in, out] in a transposed class; or its bias [out]."""
    output, input = (_size(match, symbol) for symbol in (match.rule.output, match.rule.input))
    fields = _dims(match, output, input)
    heads = match.sizes.heads(match.anchor)
    if match.rule.role in ("query", "query_up", "key_value_up", "attention_gate"):
        fields["heads"] = heads.query
    elif match.rule.role in ("key", "value"):
        fields["heads"] = heads.key
    elif match.rule.role == "attention_output" and fields.get("input_dim") is not None:
        fields["heads"] = heads.query
    _whole_heads(match, fields)
    if match.rule.role == "head":
        fields["vocab_dim"] = fields["output_dim"]
    if "#" in match.rule.pattern and match.rule.role.startswith("expert"):
        fields["expert"] = int(match.name.path[-2])
    return fields


def _whole_heads(match: Match, fields: Fields) -> None:
    """Even where nothing tells the size of a head, heads must divide what runs over them."""
    dim = fields.get("input_dim") if match.rule.role == "attention_output" else fields["output_dim"]
    heads = fields.get("heads")
    if heads and dim is not None and match.shape[dim] % heads:
        raise Contradiction(
            f"dim {dim} of {match.parameter.name} {list(match.shape)} is {match.shape[dim]}, no multiple of {heads} "
            "heads"
        )


def lookup(match: Match) -> Fields:
    """A table [vocabulary, width]."""
    _dimensions(match, 2)
    _expect(match, 0, match.sizes.vocabulary)
    width = match.sizes.configured("word_embed_proj_dim") or match.sizes.configured("embedding_size")
    _expect(match, 1, Size(width, "the configuration's width of embeddings") if width else match.sizes.hidden)
    return {"vocab_dim": 0, "why": f"{match.shape[0]} tokens"}


def positions(match: Match) -> Fields:
    """A table [positions, hidden]."""
    _dimensions(match, 2)
    _expect(match, 1, match.sizes.hidden)
    return {"why": f"{match.shape[0]} positions"}


def vector(match: Match) -> Fields:
    """A norm's weight or bias [features]."""
    _dimensions(match, 1)
    size = _size(match, match.rule.output)
    if size is None:
        raise Contradiction(f"nothing tells the size that {match.parameter.name} {list(match.shape)} must have")
    _expect(match, 0, size)
    return {"why": f"{size.value} features: {size.source}"}


def head_vector(match: Match) -> Fields:
    """One number for each query head."""
    _dimensions(match, 1)
    heads = match.sizes.heads(match.anchor)
    if heads.query is None:
        raise Contradiction("nothing tells the number of heads; the configuration has none")
    _expect(match, 0, Size(heads.query, heads.source))
    return {"output_dim": 0, "heads": heads.query, "why": f"{heads.query} heads"}


def gate(match: Match) -> Fields:
    """A weight [gates, in]: a gate for each head, or for each of its features."""
    heads = match.sizes.heads(match.anchor)
    each = heads.query_size if heads.value_size is None else heads.value_size
    count = match.shape[0] if match.shape else 0
    if not heads.query or count not in (heads.query, heads.query * (each or 0)):
        raise Contradiction(
            f"{match.parameter.name} {list(match.shape)} has {count} gates; expected one for each of {heads.query} "
            f"heads, or for each of their {each} features"
        )
    return _dims(match, None, _size(match, match.rule.input)) | {"heads": heads.query}


def one_number(match: Match) -> Fields:
    """One element, in whatever shape."""
    if match.parameter.numel != 1:
        raise Contradiction(f"{match.parameter.name} {list(match.shape)} has {match.parameter.numel} elements, not one")
    return {"why": "one number"}


def any_shape(match: Match) -> Fields:
    """What no axis cuts, and what every rank uses as it is."""
    return {"why": f"{match.owner} of shape {list(match.shape)}, kept whole"}


def query_norm(match: Match) -> Fields:
    """A norm of queries: [head size], [heads * head size] or [heads, head size]."""
    return _norm_of_heads(match, match.sizes.heads(match.anchor).query, "q_proj")


def key_norm(match: Match) -> Fields:
    """A norm of keys: the same with key/value heads."""
    return _norm_of_heads(match, match.sizes.heads(match.anchor).key, "k_proj")


def _norm_of_heads(match: Match, count: int | None, projection: str) -> Fields:
    shape, each = match.shape, match.sizes.heads(match.anchor).query_size
    rows = match.sizes.extent(match.anchor + (projection,), 0)
    width = rows or (count * each if count and each else 0)
    if each and shape == (each,):
        return {"role": "head_norm", "why": f"one head has {each} features"}
    if width and shape == (width,):
        return {"role": "wide_norm", "output_dim": 0, "heads": count, "why": f"all heads have {width} features"}
    if count and each and shape == (count, each):
        return {"role": "per_head_norm", "output_dim": 0, "heads": count, "why": f"{count} heads of {each}"}
    raise Contradiction(
        f"{match.parameter.name} has the shape {list(shape)}; expected [{each}] (one head), [{width}] (all heads) or "
        f"[{count}, {each}] (each head)"
    )


def fused_attention(match: Match) -> Fields:
    """Queries, keys and values out of one projection, in the order that the architecture tells."""
    entry = _fused_entry(match)
    fields = _dims(match, None, _size(match, match.rule.input))
    rows = match.shape[fields["output_dim"]]
    heads = match.sizes.heads(match.anchor)
    count, each = heads.query, heads.query_size
    if not (count and each):
        raise Contradiction(
            f"the fused projection {match.parameter.name} needs the number of heads, and the configuration has none"
        )
    shared = {"one": 1, "each": count}.get(entry.key_value_heads) or match.sizes.configured(entry.key_value_heads)
    if not shared or count % shared:
        raise Contradiction(
            f"the fused projection {match.parameter.name} needs {entry.key_value_heads} in the configuration, a "
            f"divisor of {count} heads; found {shared}"
        )
    words = f"{count} query and {shared} key/value heads of {each}, {entry.order}"
    _expect(match, fields["output_dim"], Size((count + 2 * shared) * each, words))
    fields["why"] = f"{words}: {rows} features"
    if entry.order == "woven":
        return fields | {"heads": 1}
    if entry.order == "grouped":
        return fields | {"heads": shared}
    blocks = (count, shared, shared)
    packing = tuple(block * each for block in blocks)
    return fields | {"packing": packing, "heads": count, "packed_heads": blocks, "sliced": entry.sliced}


def _fused_entry(match: Match) -> FusedAttention:
    """The architecture's entry; classes go before model types, since a class is its own code."""
    config, model_type = match.sizes.config, match.sizes.config.get("model_type")
    entries = [each for each in FUSED_ATTENTION if match.holder in each.classes]
    entries = entries or [each for each in FUSED_ATTENTION if model_type in each.model_types]
    if not entries:
        raise Contradiction(
            f"a fused projection, and only the code of {match.holder or 'its module'} tells the order of its features; "
            f"known: {_listing(name for each in FUSED_ATTENTION for name in each.classes[:1])}"
        )
    for entry in entries:
        missing = [key for key in entry.when if key not in config]
        if missing:
            raise Contradiction(f"the order of features in {match.holder} depends on the configuration's {missing[0]}")
        if all(bool(config[key]) == value for key, value in entry.when.items()):
            return entry
    raise Contradiction(f"the configuration fits none of the known forms of {match.holder}")


def fused_gate(match: Match) -> Fields:
    """Gate rows, then up rows, where the architecture is known to lay them so."""
    model_type = match.sizes.config.get("model_type")
    if not any(match.holder in each.classes or model_type in each.model_types for each in FUSED_GATES):
        raise Contradiction(
            f"gate and up in one projection, and only the code of {match.holder or 'its module'} tells their order; "
            f"known: {_listing(name for each in FUSED_GATES for name in each.classes)}"
        )
    fields = _dims(match, None, _size(match, match.rule.input))
    half = _half(match, fields["output_dim"])
    return fields | {"packing": (half, half), "why": f"gate and up of {half} features end to end"}


def packed(match: Match) -> Fields:
    """All experts in one tensor of three dims, laid out as the class is known to do."""
    _dimensions(match, 3)
    known = _packed_entry(match)
    output, input = (2, 1) if known.transposed else (1, 2)
    _expect(match, output if match.rule.role == "expert_down" else input, match.sizes.hidden)
    order = "[experts, in, out]" if known.transposed else "[experts, out, in]"
    fields: Fields = {"output_dim": output, "input_dim": input, "expert_dim": 0, "why": f"{match.owner} keeps {order}"}
    return _with_gate(match, fields, known)


def packed_bias(match: Match) -> Fields:
    """Biases of all experts, [experts, out]."""
    _dimensions(match, 2)
    known = _packed_entry(match)
    if match.rule.role == "expert_down":
        _expect(match, 1, match.sizes.hidden)
    fields: Fields = {"output_dim": 1, "expert_dim": 0, "why": f"{match.owner} keeps [experts, out]"}
    return _with_gate(match, fields, known)


def _packed_entry(match: Match) -> PackedExperts:
    for each in PACKED_EXPERTS:
        if match.owner in each.classes:
            return each
    raise Contradiction(
        f"experts in one tensor, and only the code of {match.owner} tells which dim is which; known: "
        f"{_listing(name for each in PACKED_EXPERTS for name in each.classes)}"
    )


def _with_gate(match: Match, fields: Fields, known: PackedExperts) -> Fields:
    """The same, and how gates and ups lie along the outputs where there are both."""
    if match.rule.role != "expert_gate_up":
        return fields
    half = _half(match, fields["output_dim"])
    if known.interleaved > 1:
        return fields | {"interleaved": known.interleaved, "why": f"{fields['why']}, gate and up one by one"}
    return fields | {"packing": (half, half), "why": f"{fields['why']}, gates before ups"}


def router(match: Match) -> Fields:
    """Scores of experts: [experts, hidden], and the bias [experts]."""
    experts = expert_count(match)
    if match.name.leaf == "bias":
        _dimensions(match, 1)
        _expect(match, 0, experts)
        return {"role": "router_bias", "output_dim": 0, "why": f"{match.shape[0]} experts"}
    return _dims(match, experts, match.sizes.hidden, ROUTER_CLASSES)


def correction(match: Match) -> Fields:
    """One number for each expert, [experts] or [1, experts]."""
    experts = expert_count(match)
    found = 1
    for size in match.shape:
        found *= size
    if experts and found != experts.value:
        raise Contradiction(f"{match.parameter.name} has {found} elements, expected {experts.value}: {experts.source}")
    return {"output_dim": len(match.shape) - 1, "why": f"{found} experts"}


def expert_count(match: Match) -> Size | None:
    """How many experts the block around a router holds."""
    experts = match.anchor + ("experts",)
    for path, leaf in (
        (experts, "gate_up_proj"),
        (experts, "up_proj"),
        (match.anchor + ("input_linear",), "weight"),
    ):
        shape = match.sizes.shape(path, leaf)
        if shape and len(shape) == 3:
            return Size(shape[0], f"experts in {path[-1]}.{leaf}")
    listed = [child for child in match.sizes.children.get(experts, ()) if child.isdigit()]
    return Size(len(listed), "modules in the list of experts") if listed else None


FORMS: dict[str, Callable[[Match], Fields]] = {
    "linear": linear,
    "lookup": lookup,
    "positions": positions,
    "vector": vector,
    "heads": head_vector,
    "gate": gate,
    "one number": one_number,
    "any": any_shape,
    "query norm": query_norm,
    "key norm": key_norm,
    "fused attention": fused_attention,
    "fused gate and up": fused_gate,
    "packed": packed,
    "packed bias": packed_bias,
    "router": router,
    "correction": correction,
}


def _size(match: Match, symbol: str) -> Size | None:
    return match.sizes.size(symbol, match.anchor) if symbol else None


def _dims(match: Match, output: Size | None, input: Size | None, known: tuple[str, ...] = ()) -> Fields:
    """The dims of a weight or a bias, after checking that they have the sizes claimed."""
    if match.name.leaf == "bias":
        _dimensions(match, 1)
        _expect(match, 0, output)
        return {"output_dim": 0, "why": _words(match, output, None)}
    _dimensions(match, 2)
    out, inner = _order(match, output, input, known)
    _expect(match, out, output)
    _expect(match, inner, input)
    return {"output_dim": out, "input_dim": inner, "why": _words(match, output, input)}


def _order(match: Match, output: Size | None, input: Size | None, known: tuple[str, ...]) -> tuple[int, int]:
    """Which dim is the output's: the class tells, and where it is a stranger the shape may."""
    if matches(match.owner, TRANSPOSED_CLASSES):
        return 1, 0
    if matches(match.owner, LINEAR_CLASSES + known):
        return 0, 1
    fitting = [
        (out, inner)
        for out, inner in ((0, 1), (1, 0))
        if (output is None or match.shape[out] == output.value) and (input is None or match.shape[inner] == input.value)
    ]
    if len(fitting) == 1:
        return fitting[0]
    stranger = f"{match.owner} is no kind of linear that is known, and the shape {list(match.shape)}"
    if not fitting:
        raise Contradiction(f"{stranger} fits in no order: expected {_words(match, output, input)}")
    raise Contradiction(
        f"{stranger} does not tell which dim is over outputs, since both may be; it is cut only where its class goes "
        "by a known name, such as Linear"
    )


def _words(match: Match, output: Size | None, input: Size | None) -> str:
    told = [f"out {size.value} = {size.source}" for size in (output,) if size]
    told += [f"in {size.value} = {size.source}" for size in (input,) if size]
    return ", ".join(told) or f"{match.owner} of shape {list(match.shape)}"


def _dimensions(match: Match, count: int) -> None:
    if len(match.shape) != count:
        raise Contradiction(
            f"{match.parameter.name} has {len(match.shape)} dims, {list(match.shape)}; expected {count}"
        )


def _expect(match: Match, dim: int, size: Size | None) -> None:
    if size and match.shape[dim] != size.value:
        raise Contradiction(
            f"dim {dim} of {match.parameter.name} {list(match.shape)} is {match.shape[dim]}, expected {size.value}: "
            f"{size.source}"
        )


def _half(match: Match, dim: int) -> int:
    if match.shape[dim] % 2:
        raise Contradiction(
            f"dim {dim} of {match.parameter.name} {list(match.shape)} holds gate and up, so it must be even"
        )
    return match.shape[dim] // 2


@lru_cache(maxsize=4096)
def matches(class_name: str, patterns: tuple[str, ...]) -> bool:
    """Tell whether a class name is of one of the kinds."""
    return any(fnmatchcase(class_name, pattern) for pattern in patterns)


def _listing(names: Iterable[str]) -> str:
    unique = list(dict.fromkeys(names))
    return ", ".join(unique[:6]) + (f" and {len(unique) - 6} more" if len(unique) > 6 else "")
