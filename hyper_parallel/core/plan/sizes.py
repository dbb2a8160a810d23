"""The sizes that a model must agree with: from its configuration, else from shapes that can mean only one thing."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Callable, Iterable, Iterator, Mapping

from hyper_parallel.core.plan.architectures import GATED_QUERIES, OWN_HEADS
from hyper_parallel.core.plan.model import ParameterDescription
from hyper_parallel.core.plan.names import Name
from hyper_parallel.core.plan.role_rules import CONFIG_KEYS, KINDS

Path = tuple[str, ...]


@dataclass(frozen=True)
class Size:
    """A number, and where it comes from, in words."""

    value: int
    source: str


class Contradiction(Exception):
    """A shape is not what the name promises. Never leaves the planner: it becomes a line of what was tried."""


@dataclass(frozen=True)
class Heads:
    """How an attention module cuts its features into heads. A None is not known."""

    query: int | None = None
    key: int | None = None
    query_size: int | None = None
    value_size: int | None = None
    key_value_size: int | None = None
    gates: int = 1
    source: str = ""


class Sizes:
    """What is known of a model's sizes. `members` maps a logical module path and a leaf to the parameter there."""

    def __init__(
        self,
        config: Mapping[str, Any],
        named: Iterable[tuple[Name, ParameterDescription]],
        class_of: Callable[[Path], str],
    ) -> None:
        text = config.get("text_config")
        self.config: Mapping[str, Any] = text if isinstance(text, Mapping) else config
        self._has_other_heads = any(_has_heads(each) for each in _nested(config) if each is not self.config)
        self.members: dict[tuple[Path, str], ParameterDescription] = {}
        self.children: dict[Path, set[str]] = {}
        for name, parameter in named:
            if name.adapter:
                continue
            self.members.setdefault((name.path, name.leaf), parameter)
            for depth in range(len(name.path) - 1, -1, -1):
                children = self.children.setdefault(name.path[:depth], set())
                if name.path[depth] in children:
                    break
                children.add(name.path[depth])
        self.hidden: Size | None = self._configured("hidden")
        self.vocabulary: Size | None = self._configured("vocabulary")
        self._class_of = class_of
        self._heads: dict[Path, Heads] = {}
        self._lists: frozenset[Path] | None = None
        self._beside: set[Path] | None = None

    def shape(self, path: Path, leaf: str = "weight") -> tuple[int, ...] | None:
        """The shape of a parameter by its logical place."""
        found = self.members.get((path, leaf))
        return found.shape if found else None

    def extent(self, path: Path, dim: int) -> int:
        """Rows (0) or columns (1) of the matrix at a logical place; 0 where there is none."""
        shape = self.shape(path)
        return shape[dim] if shape and len(shape) == 2 else 0

    def configured(self, key: str) -> int | None:
        """A positive whole number of the configuration, by its own key."""
        value = self.config.get(key)
        return value if _is_size(value) else None

    def size(self, symbol: str, holder: Path) -> Size | None:
        """What a rule's `output` or `input` stands for in the module `holder`; None where nothing tells."""
        if symbol in ("hidden", "vocabulary"):
            return self.hidden if symbol == "hidden" else self.vocabulary
        if symbol == "one":
            return Size(1, "one gate")
        if "latent" in symbol:
            return self._latent(symbol, holder)
        heads = self.heads(holder)
        count = heads.key if symbol in ("key", "value") else heads.query
        each = {
            "query": heads.query_size and heads.query_size * heads.gates,
            "key": heads.query_size,
            "value": heads.value_size,
            "mixed": heads.value_size,
            "key and value": heads.key_value_size,
        }[symbol]
        return Size(count * each, f"{count} heads of {each} ({heads.source})") if count and each else None

    def heads(self, holder: Path) -> Heads:
        """The heads of the attention module `holder`."""
        if holder not in self._heads:
            self._heads[holder] = self._find_heads(holder)
        return self._heads[holder]

    def _find_heads(self, holder: Path) -> Heads:
        layer = _layer(holder)
        count = self._configured("heads", layer)
        if not count or not self._is_of_this_model(holder):
            return self._heads_by_norm(holder)
        if "kv_b_proj" in self.children.get(holder, ()):
            return self._latent_heads(count.value)
        keys = self._configured("key/value heads", layer) or count
        each = self._configured("head", layer)
        if each is None:
            if self.hidden is None or self.hidden.value % count.value:
                return Heads(count.value, keys.value, source=count.source)
            each = Size(self.hidden.value // count.value, f"{self.hidden.source} / {count.source}")
        sources = ", ".join(dict.fromkeys((count.source, keys.source, each.source)))
        if self._class_of(holder) in OWN_HEADS:
            return self._own_heads(holder, count, each)
        gates = 2 if self._class_of(holder) in GATED_QUERIES else 1
        return Heads(count.value, keys.value, each.value, each.value, gates=gates, source=sources)

    def _own_heads(self, holder: Path, count: Size, each: Size) -> Heads:
        """Values of another size than keys, and as many of both as there are rows for."""
        rows, value = self.extent(holder + ("k_proj",), 0), self.configured("v_head_dim")
        if not rows or rows % each.value or not value:
            return Heads(count.value, source=count.source)
        source = f"{count.source}, {each.source}, v_head_dim, rows of k_proj"
        return Heads(count.value, rows // each.value, each.value, value, source=source)

    def _is_of_this_model(self, holder: Path) -> bool:
        """Tell whether the configured heads are those of `holder`. Where there are several lists of blocks, or the
        configuration has another part with heads of its own (a vision tower), it speaks for the list that stands beside
        the vocabulary; for none, where two stand so."""
        lists = self._attending_lists()
        if not self._has_other_heads and len(lists) < 2:
            return True
        own = _list_of(holder)
        others = any(self._is_beside_vocabulary(each) for each in lists if each != own)
        return self._is_beside_vocabulary(own) and not others

    def _attending_lists(self) -> frozenset[Path]:
        """The lists of blocks that have attention in them."""
        if self._lists is None:
            names, classes = KINDS["attention"]
            found = set()
            for path in self.children:
                attends = path and (
                    path[-1] in names or any(fnmatchcase(self._class_of(path), each) for each in classes)
                )
                if attends and any(segment.isdigit() for segment in path):
                    found.add(_list_of(path))
            self._lists = frozenset(found)
        return self._lists

    def _is_beside_vocabulary(self, blocks: Path) -> bool:
        """Tell whether the module that holds a list of blocks holds a table or a head of the vocabulary too."""
        if self._beside is None:
            rows = self.vocabulary and self.vocabulary.value
            self._beside = {path[:-1] for (path, _), each in self.members.items() if path and each.shape[:1] == (rows,)}
        return blocks[:-1] in self._beside

    def _heads_by_norm(self, holder: Path) -> Heads:
        """Without a configuration: a norm of queries that is narrower than they are is one head wide."""
        norm = self.shape(holder + ("q_norm",))
        rows, keys = self.extent(holder + ("q_proj",), 0), self.extent(holder + ("k_proj",), 0)
        if not (norm and len(norm) == 1 and 0 < norm[0] < rows and rows % norm[0] == 0 and keys % norm[0] == 0):
            return Heads()
        each = norm[0]
        return Heads(rows // each, keys // each or None, each, each, source="the size of q_norm")

    def _latent_heads(self, count: int) -> Heads:
        plain, turned = self.configured("qk_nope_head_dim"), self.configured("qk_rope_head_dim")
        value = self.configured("v_head_dim")
        if not (plain and turned and value):
            return Heads(count, count, source="num_attention_heads")
        source = "num_attention_heads, qk_nope_head_dim, qk_rope_head_dim, v_head_dim"
        return Heads(count, count, plain + turned, value, plain + value, source=source)

    def _latent(self, symbol: str, holder: Path) -> Size | None:
        """The width of a latent: the configuration's, else what the projection out of it takes in."""
        where = "q_b_proj" if symbol == "query latent" else "kv_b_proj"
        inner = self.extent(holder + (where,), 1)
        key = "query latent" if symbol == "query latent" else "latent"
        latent = self._configured(key) or (Size(inner, f"columns of {where}") if inner else None)
        if symbol != "latent and rope" or latent is None:
            return latent
        turned = self.configured("qk_rope_head_dim")
        return Size(latent.value + turned, f"{latent.source} + qk_rope_head_dim") if turned else None

    def _configured(self, what: str, layer: int | None = None) -> Size | None:
        """What the configuration says of the model; or of one layer, where it says something else of that."""
        for key in CONFIG_KEYS[what]:
            if layer is not None and (own := self._of_layer(key, layer)):
                return own
            value = self.configured(key)
            if value:
                return Size(value, key)
        return None

    def _of_layer(self, key: str, layer: int) -> Size | None:
        """A number of one layer: `per_layer_config` maps layers to what differs, `KEY_per_layer` lists all of them."""
        layers, listed = self.config.get("per_layer_config"), self.config.get(f"{key}_per_layer")
        if isinstance(layers, Mapping):
            for number, own in layers.items():
                if (
                    str(number).isdigit()
                    and int(number) == layer
                    and isinstance(own, Mapping)
                    and _is_size(own.get(key))
                ):
                    return Size(own[key], f"per_layer_config.{number}.{key}")
        if isinstance(listed, (list, tuple)) and layer < len(listed) and _is_size(listed[layer]):
            return Size(listed[layer], f"{key}_per_layer[{layer}]")
        return None


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _layer(path: Path) -> int | None:
    """The number of the block that a module stands in, None for one in no list."""
    return next((int(segment) for segment in path if segment.isdigit()), None)


def _nested(config: Any) -> Iterator[Mapping[str, Any]]:
    """The mappings inside of a configuration, at any depth."""
    for each in config.values() if isinstance(config, Mapping) else config:
        if isinstance(each, Mapping):
            yield each
        if isinstance(each, (Mapping, list, tuple)):
            yield from _nested(each)


def _has_heads(part: Mapping[str, Any]) -> bool:
    """Tell whether a part of a configuration counts heads, under whatever name."""
    return any(
        (str(key).endswith("heads") or key == "n_head") and bool(value) and not isinstance(value, (bool, Mapping))
        for key, value in part.items()
    )


def _list_of(path: Path) -> Path:
    """The outermost list on a path to a module; for one in no list, the module itself."""
    return path[: next((depth for depth, segment in enumerate(path) if segment.isdigit()), len(path))]
