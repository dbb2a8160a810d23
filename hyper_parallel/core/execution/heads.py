"""Attention on its own heads: how many there are, which they are."""

from __future__ import annotations

from typing import Iterator

from hyper_parallel.core.backend import Module, Tensor
from hyper_parallel.core.errors import ContractError
from hyper_parallel.core.execution.adaptations import Adaptations
from hyper_parallel.core.execution.facts import Facts, is_cut, is_in
from hyper_parallel.core.plan.model_json import config_of
from hyper_parallel.core.plan.plan import ParameterPlan
from hyper_parallel.core.plan.role_rules import CONFIG_KEYS
from hyper_parallel.core.regions import chunk_bounds

QUERY_COUNTS = ("num_heads", "num_attention_heads", "n_head", "n_heads")
KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "num_key_heads", "n_kv_heads")
"""Attributes of attention from which its code reads how many heads there are."""

WIDTHS = ("split_size", "embed_dim", "hidden_size", "inner_dim", "attn_hidden_size")
"""Attributes of attention from which its code reads the features of all heads together."""

QUERIES_PER_KEY = ("num_key_value_groups", "groups", "n_rep")
"""Attributes of attention that say how many query heads share a key head."""

SLOPES = ("alibi", "position_bias", "attention_mask")
"""Arguments of attention that may have something for each head: `[samples, heads, queries, keys]`, and but for masks
`[heads, queries, keys]` or `[samples * heads, queries, keys]`."""


OUTPUTS = "nf"
"""Where a linear with a transposed weight keeps the number of its outputs."""


def find_heads(facts: Facts, found: Adaptations) -> None:
    """Tell every attention that is cut what its own heads are, and transposed linears how wide they are."""
    for parameter in facts.plan.parameters:
        for use in facts.uses[parameter.name] if is_cut(parameter) and len(parameter.shape) == 2 else ():
            if OUTPUTS in vars(use.owner):
                found.show(use.owner, OUTPUTS, facts.local_shape(parameter)[1])
    gathered = _gathered(facts)
    for boundary in facts.plan.boundaries:
        name = boundary.module
        if boundary.kind == "attention" and name in facts.cut and name not in gathered:
            kept = _kept_whole(facts, name)
            # What is whole inside works on all heads, such as what only chooses keys.
            below = [(path, each) for path, each in facts.modules.items() if is_in(path, name)]
            below = [(path, each) for path, each in below if facts.cut_in.get(path, True)]
            slopes = _query_heads(facts.modules[name])
            for path, module in below:
                _count(facts, found, path, module, _key_heads(facts, kept[0]) if kept else None)
            if slopes is not None:
                found.arguments.setdefault(name, []).append(OwnSlopes(name, slopes, facts.place, facts.ranks))
            for parameter in kept:
                _pick(facts, found, name, parameter)


def _gathered(facts: Facts) -> set[str]:
    """Attention whose fused projection gathers its output: it works on all heads."""
    return {
        each.module.rpartition(".")[0]
        for each in facts.plan.boundaries
        if each.kind == "projection" and each.outputs and each.outputs[0].name == "features"
    }


def _kept_whole(facts: Facts, attention: str) -> list[ParameterPlan]:
    """The weights of key/value heads that every rank has all of, there being fewer than ranks."""
    members = (each for each in facts.plan.parameters if each.boundary == attention)
    return [each for each in members if each.role in ("key", "value") and len(each.shape) > 1 and not is_cut(each)]


def _query_heads(attention: Module) -> int | None:
    return next((vars(attention)[name] for name in QUERY_COUNTS if _is_count(vars(attention).get(name))), None)


def _count(facts: Facts, found: Adaptations, path: str, module: Module, kept_keys: int | None) -> None:
    """The attributes of a module in attention that count heads or the features of all of them."""
    for name, value in list(vars(module).items()):
        if not _is_count(value):
            continue
        if name in QUERIES_PER_KEY and kept_keys is not None:
            # A rank goes on with one key head, which all its query heads share.
            found.show(module, name, max(value * kept_keys // facts.ranks, 1))
        elif name in (*QUERY_COUNTS, *WIDTHS, *KEY_COUNTS) and value > 1:
            few = name in (*QUERY_COUNTS, *KEY_COUNTS) and facts.ranks % value == 0
            if value % facts.ranks and not few:
                found.problems.append(
                    f"{path}.{name} is {value}, which can't be dealt out to {facts.ranks} tensor ranks"
                )
            found.show(module, name, max(value // facts.ranks, 1))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class OwnSlopes:
    """Of something for each of all heads what belongs to a rank's own. The number of dims tells which is over heads, as
    a number of samples may look like a number of heads: of four the second, of three the first."""

    def __init__(self, attention: str, heads: int, place: int, ranks: int):
        self.attention = attention
        self.heads = heads
        self._start, self._stop = chunk_bounds(heads, ranks, place)

    def __call__(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments of attention with its own heads' part.

        Raises:
            ContractError: one has another number of dims, or no size that all heads can have.
        """
        for key in SLOPES:
            value = kwargs.get(key)
            found = None if value is None else self.dim_of_heads(key, value)
            if found is not None:
                dim, blocks = found
                before, after = tuple(value.shape[:dim]), tuple(value.shape[dim + 1 :])
                split = value.reshape((*before, blocks, self.heads, *after))
                own = split[(slice(None),) * (dim + 1) + (slice(self._start, self._stop),)]
                kwargs = {**kwargs, key: own.reshape((*before, -1, *after))}
        return args, kwargs

    def dim_of_heads(self, key: str, value: Tensor) -> tuple[int, int] | None:
        """The dim over heads, and how many times all of them stand along it; None where all heads share the value.

        Raises:
            ContractError: as calling does.
        """
        shape = tuple(int(size) for size in value.shape)
        if len(shape) == 4 and shape[1] in (1, self.heads):
            return (1, 1) if shape[1] > 1 else None
        if key == "attention_mask":
            return None
        if len(shape) == 3 and shape[0] % self.heads == 0:
            return 0, shape[0] // self.heads
        raise ContractError(
            f"{self.attention} takes {key} of shape {list(shape)}, and works on a part of its {self.heads} heads; "
            f"which part of {key} these need is known for [samples, {self.heads}, queries, keys], "
            f"[{self.heads}, queries, keys] and [samples * {self.heads}, queries, keys]; for another shape keep the "
            "module whole: "
            f"{self.attention}.**: {{placements: {{tensor: replicate}}}}"
        )


def _key_heads(facts: Facts, parameter: ParameterPlan) -> int | None:
    """How many key/value heads a weight makes, where the model says so."""
    config = config_of(facts.model)
    nested = config.get("text_config")
    config = nested if isinstance(nested, dict) else config
    for key in CONFIG_KEYS["key/value heads"]:
        heads = config.get(key)
        if _is_count(heads) and heads > 0 and facts.ranks % heads == 0:
            return heads
    size = getattr(facts.modules[parameter.boundary], "head_dim", None)
    features = _features(facts, parameter)
    heads = features // size if _is_count(size) and size > 0 and features % size == 0 else None
    return heads if heads and facts.ranks % heads == 0 else None


def _features(facts: Facts, parameter: ParameterPlan) -> int:
    transposed = hasattr(facts.uses[parameter.name][0].owner, OUTPUTS)
    return parameter.shape[1 if transposed else 0]


def _pick(facts: Facts, found: Adaptations, attention: str, parameter: ParameterPlan) -> None:
    """Of key/value heads that are kept whole a rank goes on with the one that its query heads use."""
    heads = _key_heads(facts, parameter)
    if heads is None:
        found.problems.append(
            f"{parameter.name} is whole on every tensor rank, and nothing tells how many heads it makes; "
            "give the model a config with num_key_value_heads"
        )
        return
    size, index = _features(facts, parameter) // heads, facts.place * heads // facts.ranks
    module = parameter.name.rpartition(".")[0]
    if parameter.role == "key":
        module = next(_norms_of_keys(facts, attention), module)  # it needs all heads, so the choice comes after it
    found.handed_on.setdefault(module, []).append(OwnHead(index * size, size))


def _norms_of_keys(facts: Facts, attention: str) -> Iterator[str]:
    for each in facts.plan.parameters:
        module = each.name.rpartition(".")[0]
        if each.role == "wide_norm" and is_in(module, attention) and module.rpartition(".")[2].startswith("k"):
            yield module


class OwnHead:
    """Of the features of all heads those of one."""

    def __init__(self, start: int, size: int):
        self._start = start
        self.size = size

    def __call__(self, tensor: Tensor) -> Tensor:
        """A part of the last dim."""
        return tensor[..., self._start : self._start + self.size]
