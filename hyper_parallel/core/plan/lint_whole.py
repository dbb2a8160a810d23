"""Rules of lint on what is whole, or would be if an override said so: it must work on nothing that an axis cuts.

Nothing is known of such a parameter but where it stands and its sizes. In a module that is cut, a size that heads or
cut features have may be theirs: then that module has to be whole too. A module that stands beside known ones inside of
another shares more with them than hidden states: then none of them keeps a role.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Container, Iterable, Iterator, Sequence

from hyper_parallel.core.plan.assignment import Assignment, RoleResult
from hyper_parallel.core.plan.cut_sizes import HEADS, CutSize, cut_sizes
from hyper_parallel.core.plan.grouping import Group
from hyper_parallel.core.plan.names import block_around, parse
from hyper_parallel.core.plan.role_rules import KEYS, LIST_CLASSES, QUERIES, ROLES, WRAPPERS
from hyper_parallel.core.plan.templates import Member, scopes
from hyper_parallel.core.plan.violations import Finding, numberless
from hyper_parallel.core.plan.whole import Place, above, acting_kinds, whole_places

if TYPE_CHECKING:
    from hyper_parallel.core.plan.derive import Draft

_AXES = ("expert", "tensor")
_NONE = "{role: none}"
_QUERIES, _KEYS = frozenset(QUERIES.split("|")), frozenset(KEYS.split("|"))

Sizes = dict[int, list[CutSize]]
"""All that is cut and has a size, by that size."""


@dataclass(frozen=True)
class Conflict:
    """Why a parameter can't be whole where it stands, and the lines, (pattern, entry), with which it can."""

    message: str
    lines: tuple[tuple[str, str], ...]


class WholeParameters:
    """The parameters of a draft that an override keeps whole, and the unknown ones, for which it may be asked to."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.places: dict[str, Place] = {}
        roles = draft.roles
        if not roles.unknown and not any(each.role == "whole" for each in roles.assignments.values()):
            return
        self._scope_of = scopes(draft.groups, draft.kinds, draft.members)
        asked = {name: Assignment(name, "whole", "") for name in roles.unknown}
        self._kinds = acting_kinds(draft.kinds, self._scope_of)
        self.places = whole_places(draft.model, RoleResult({**roles.assignments, **asked}, {}), self._kinds)
        self._sizes: dict[tuple[str, ...], Sizes] = {}
        self._conflicts: dict[str, Conflict | None] = {}

    def unknown(self, name: str, tried: Sequence[str]) -> Finding:
        """That no rule knows a parameter, with the lines that keep it whole and the plan right."""
        conflict, told = self._conflict(name), "; ".join(tried)
        if conflict is None:
            return Finding("unknown", name, told, name, _NONE)
        return _finding("unknown", name, f"{told}; it {conflict.message}", conflict)

    def misplaced(self, told: Container[str]) -> Iterator[Finding]:
        """What an override keeps whole where it can't be, but for those of which other rules have told."""
        for name in self.places:
            if name in self.draft.roles.unknown or name in told:
                continue
            conflict = self._conflict(name)
            if conflict is not None:
                yield _finding("consistent", name, f"stays whole with role: none, and {conflict.message}", conflict)

    def stays_alone(self, name: str) -> bool:
        """Tell whether a parameter may be whole where it stands, and need not be so with all of a wider module."""
        conflict = self._conflict(name)
        return conflict is None or all(fix != _NONE or pattern == name for pattern, fix in conflict.lines)

    def explain(self, finding: Finding) -> bool:
        """Tell whether a finding on what an override does not speak of only follows from an unknown or misplaced
        parameter, in the same part of a block."""
        if finding.rule not in ("chain", "consistent") or not self._causes:
            return False
        overrides, where = self.draft.overrides, finding.where
        decided = where in overrides.parameters or where in overrides.modules
        return not decided and any(each in self._causes for each in (where, *above(where)))

    def _conflict(self, name: str) -> Conflict | None:
        if name not in self._conflicts:
            place = self.places[name]
            self._conflicts[name] = (
                self._tied_to_a_cut(name)
                or self._around_a_cut(name)
                or self._in_a_mixer(place)
                or self._among_others(name, place)
                or self._takes_keys(name)
                or self._by_size(name, place)
                or self._beside_a_sum(name, place)
                or self._in_attention(name, place)
                or self._bare_outside(name, place)
            )
        return self._conflicts[name]

    @cached_property
    def _causes(self) -> set[str]:
        """The parts of blocks that hold something unknown or misplaced."""
        names = (each for each in self.places if each in self.draft.roles.unknown or self._conflict(each))
        return {part for name in names if (part := self._part(name))}

    def _tied_to_a_cut(self, name: str) -> Conflict | None:
        """Unknown under one name, and cut under another."""
        tied, members = self.draft.model.tied, self.draft.members
        if name not in self.draft.roles.unknown or not (name in tied or name in tied.values()):
            return None
        first = tied.get(name, name)
        others = (each for each in (first, *tied) if tied.get(each, each) == first and each in members)
        other = next((each for each in others if members[each].is_cut), None)
        if other is None:
            return None
        message = f"is the same tensor as {other}, which tensor cuts"
        return Conflict(message, self._lines(name, self._unit(self.draft.holder[other]), ["tensor"]))

    def _around_a_cut(self, name: str) -> Conflict | None:
        """In a linear or a table that is cut, or an adapter around it."""
        parsed, member = parse(name), None
        if parsed.adapter:
            member = self._cut.get(parsed.module(len(parsed.path)))
        for module in above(name) if member is None else ():
            found = self._cut.get(module)
            if found and parse(found.description.name).leaf == "weight":
                member = found
                break
        if member is None:
            return None
        inner = member.description.name
        unit, sizes = self._unit(self.draft.holder[inner]), self.draft.shapes[name]
        axes = [axis for axis in _AXES if axis in member.placed.placements]
        also = {cut.axis for size in sizes for cut in self._sizes_of(unit).get(size, ())}
        whole = [axis for axis in _AXES if axis in axes or axis in also]
        return Conflict(f"works on what {inner} does, which {_cuts(axes)}", self._lines(name, unit, whole))

    def _in_a_mixer(self, place: Place) -> Conflict | None:
        """In a mixer whose projections are cut, and give each rank a part of the gradient of hidden states; who else
        reads these would give all of it to each."""
        if self.draft.kinds.get(place.inside) != "mixer" or not self._scope_of[place.inside].cut:
            return None
        message = f"stands in the mixer {place.inside}, whose projections of hidden states are cut"
        return Conflict(message, ((f"{place.inside}.**", _NONE),))

    def _among_others(self, name: str, place: Place) -> Conflict | None:
        """In a module of its own that is only a part of what a block calls."""
        if not place.module:
            return None
        part = self._part(name)
        if not part or place.module == part or part.startswith(f"{place.module}."):
            return None
        known = (each for each in self._below.get(part, ()) if each not in self.places)
        if part == block_around(name):
            known = (each for each in known if self._family(each) in ("router", "experts"))
        other = next(known, None)
        if other is None:
            return None
        message = f"stands in {part} beside {other}, and no rule knows what passes between them"
        return Conflict(message, ((f"{part}.**", _NONE),))

    def _part(self, name: str) -> str:
        """The part of its block in which a parameter stands: what holds the experts, else a child of the block; "" for
        one in no block."""
        block, path = block_around(name), name.split(".")[:-1]
        if not block:
            return ""
        depth = len(block.split("."))
        if "experts" in path[depth:]:
            return ".".join(path[: path.index("experts", depth)])
        for end in range(depth + 1, len(path) + 1):
            module, segment = ".".join(path[:end]), path[end - 1]
            listed = segment.isdigit() or self.draft.model.modules.get(module) in LIST_CLASSES
            if segment not in WRAPPERS and not listed:
                return module
        return ".".join(path)

    def _by_size(self, name: str, place: Place) -> Conflict | None:
        """A dim as large as heads, experts or features that are cut around it."""
        sizes, shape = self._sizes_around(name, place), self.draft.shapes[name]
        listed = self._lengths_of_lists(name, place)
        found = [cut for size in dict.fromkeys((*shape, *listed)) for cut in sizes.get(size, ())]
        if not found:
            return None
        cut, size = found[0], found[0].size
        cuts = _cuts([cut.axis])
        has = f"has {size} in dim {shape.index(size)}" if size in shape else f"stands in a list of {size}"
        message = f"{has}, and {cut.parameter} has {size} {cut.words}, which {cuts}"
        if size == self._hidden:
            message += f"; {size} is the hidden size too, and nothing tells which it is"
        units = dict.fromkeys(module for each in found for module in self._unit(each.module))
        if not block_around(name):
            units = dict.fromkeys(numberless(module) for module in units)
        axes = [axis for axis in _AXES if any(each.axis == axis for each in found)]
        return Conflict(message, self._lines(name, units, axes))

    def _lengths_of_lists(self, name: str, place: Place) -> list[int]:
        """How long the lists are in which a parameter stands, inside of a boundary."""
        lengths = []
        for around in above(name) if place.inside else ():
            if around == place.inside:
                break
            holder, _, segment = around.rpartition(".")
            if segment.isdigit():
                start = len(holder) + 1
                lengths.append(len({each[start:].partition(".")[0] for each in self._below[holder]}))
        return lengths

    def _takes_keys(self, name: str) -> Conflict | None:
        """In attention without keys of its own, where other layers have some: those that are handed from layer to layer
        are of all heads, or of a rank's own."""
        if name not in self.draft.roles.unknown:
            return None
        cut = [each for each, kind in self.draft.kinds.items() if kind == "attention" and self._scope_of[each].cut]
        alike = {numberless(each): each for each in reversed(cut)}
        for module in above(name):
            other = alike.get(numberless(module))
            parts = {each[len(module) + 1 :].partition(".")[0] for each in self._below[module]}
            if other and module not in self._scope_of and parts & _QUERIES and not parts & _KEYS:
                message = (
                    f"stands in {module}, which makes no keys, and {other} may hand it its own, whose heads tensor cuts"
                )
                return Conflict(message, self._lines(name, [numberless(other)], ["tensor"]))
        return None

    def _in_attention(self, name: str, place: Place) -> Conflict | None:
        """In attention that is cut, of no size that tells. A single number is the same for all heads, and more numbers
        only where a user says so."""
        scope = self._scope_of.get(place.inside)
        if name not in self.draft.roles.unknown or scope is None or not scope.cut or prod(self.draft.shapes[name]) == 1:
            return None
        unit = self._unit(place.inside)
        if not any(self.draft.kinds.get(module) == "attention" for module in unit):
            return None
        message = f"stands in the attention {unit[0]}, which tensor cuts, and nothing tells whether all heads share it"
        return Conflict(message, self._lines(name, unit, ["tensor"]))

    def _beside_a_sum(self, name: str, place: Place) -> Conflict | None:
        """On hidden states in a module that gives a sum over ranks: behind the sum it would count once for each."""
        scope, shape = self._scope_of.get(place.inside), self.draft.shapes[name]
        if self._hidden not in shape or scope is None or not scope.cut:
            return None
        unit = self._unit(place.inside)
        groups = [each for module in unit for each in self._groups_below.get(module, ())]
        cut = [member for each in groups for member in map(self.draft.members.get, each.parameters) if member.is_cut]
        if not cut:
            return None
        last = next((member for member in cut if member.tensor == "input"), cut[-1])
        message = (
            f"has the hidden size {self._hidden} in dim {shape.index(self._hidden)}, and nothing tells "
            f"whether it works before or behind the sum that the ranks make with {last.description.name}, which tensor "
            "cuts"
        )
        return Conflict(message, self._lines(name, unit, ["tensor"]))

    def _bare_outside(self, name: str, place: Place) -> Conflict | None:
        """In no module and in no block: who uses it is not known, and so not whether each rank does so for its part."""
        if place != Place() or block_around(name) or name.rpartition(".")[2] in ("weight", "bias") or not self._cut:
            return None
        if self.draft.overrides.pending(name) is not None:
            return None
        message = (
            "stands bare outside of the blocks, and nothing tells whether cut modules use it, each rank for its part; "
            "with nothing cut it may be whole, or `pending: [tensor]` says that they do, and `pending: none` that they "
            "don't"
        )
        return Conflict(message, self._lines(name, [""], ["tensor"]))

    def _sizes_around(self, name: str, place: Place) -> Sizes:
        """The sizes that a parameter must not have: inside of a boundary those of all that is cut there. Elsewhere
        hidden states go by, and what else modules hand each other: heads, and features between halves."""
        if place.inside:
            return self._sizes_of(self._unit(place.inside))
        if place.module and self._takes_and_gives_hidden(place.module):
            return {}
        block = block_around(name)
        if block:
            halves = [each.module for each in self._groups_below.get(block, ()) if self._is_half(each.module)]
            sizes = self._sizes_of((block,))
            return {size: cuts for size, cuts in sizes.items() if size != self._hidden} | self._sizes_of(halves)
        shape = self.draft.shapes[name]
        if self._hidden in shape or sum(size > 1 for size in shape) > 2:
            return {}
        sizes = self._sizes_of(("",)).items()
        return {size: [cut for cut in cuts if cut.words in HEADS] for size, cuts in sizes}

    def _takes_and_gives_hidden(self, module: str) -> bool:
        """Tell whether sizes speak for a module between hidden states and hidden states."""
        own = [self.draft.shapes[name] for name in self._below.get(module, ())]
        return (self._hidden,) in own or sum(shape.count(self._hidden) for shape in own) > 1

    def _sizes_of(self, modules: Iterable[str]) -> Sizes:
        """The sizes of all that is cut in some modules. A mixer gathers its features before it works on them."""
        key = tuple(modules)
        if key not in self._sizes:
            found: Sizes = {}
            for group in (each for module in key for each in self._groups_below.get(module, ())):
                if self.draft.kinds[group.module] == "mixer":
                    continue
                members = [self.draft.members[name] for name in group.parameters]
                for cut in cut_sizes(group.module, members, self._scope_of[group.module].cut):
                    found.setdefault(cut.size, []).append(cut)
            self._sizes[key] = found
        return self._sizes[key]

    def _unit(self, module: str) -> Sequence[str]:
        """The modules that are cut together with one: a block of experts, the attention around a norm, both halves of a
        feed-forward layer, all names of a tied table."""
        kind, scope = self.draft.kinds.get(module), self._scope_of[module]
        if scope.block or kind is None:
            return (scope.block or module,)
        if kind == "wide_norm":
            return (next((each for each in above(module) if self.draft.kinds.get(each) == "attention"), module),)
        if self._is_half(module):
            beside = self._groups_below.get(module.rpartition(".")[0], ())
            return [each.module for each in beside if self._is_half(each.module)]
        tied = self.draft.model.tied
        if kind in ("embedding", "head"):
            own = {tied.get(name, name) for name in self._below[module]}
            names = [name for name in (*own, *tied) if tied.get(name, name) in own]
            return list(
                dict.fromkeys([module, *(self.draft.holder[name] for name in names if name in self.draft.holder)])
            )
        return (module,)

    def _is_half(self, module: str) -> bool:
        return self.draft.kinds.get(module) in ("up", "down")

    def _family(self, name: str) -> str:
        return ROLES[self.draft.members[name].assignment.role].boundary

    def _lines(self, name: str, units: Iterable[str], axes: Iterable[str]) -> tuple[tuple[str, str], ...]:
        fix = f"{{placements: {{{', '.join(f'{axis}: replicate' for axis in axes)}}}}}"
        lines = [(f"{module}.**" if module else "**", fix) for module in units]
        return (*lines, (name, _NONE)) if name in self.draft.roles.unknown else tuple(lines)

    @cached_property
    def _below(self) -> dict[str, list[str]]:
        """The names below each module."""
        found: dict[str, list[str]] = {}
        for name in self.draft.shapes:
            for module in above(name):
                found.setdefault(module, []).append(name)
        return found

    @cached_property
    def _groups_below(self) -> dict[str, list[Group]]:
        """The groups of each module and of those below it."""
        found: dict[str, list[Group]] = {}
        for group in self.draft.groups:
            for module in dict.fromkeys((group.module, *above(group.module))):
                found.setdefault(module, []).append(group)
        return found

    @cached_property
    def _hidden(self) -> int:
        return self.draft.blocks.streams.hidden

    @cached_property
    def _cut(self) -> dict[str, Member]:
        """Linears, tables and packed experts that are cut, by the module that holds them and adapters around them."""
        found: dict[str, Member] = {}
        for member in self.draft.members.values():
            if member.linear and any(axis in member.placed.placements for axis in _AXES):
                found.setdefault(member.linear, member)
        return found


def _finding(rule: str, name: str, message: str, conflict: Conflict) -> Finding:
    (target, fix), *also = conflict.lines
    return Finding(rule, name, message, target, fix, also=tuple(also))


def _cuts(axes: Sequence[str]) -> str:
    return f"{axes[0]} cuts" if len(axes) == 1 else f"{' and '.join(axes)} cut"
