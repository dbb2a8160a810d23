"""When an entry of an override file holds: conditions on sizes of mesh axes and on what the model says of itself."""

from __future__ import annotations

import difflib
import operator
import re
import reprlib
from typing import Any, Callable, Mapping

from hyper_parallel.core.mesh import AXES, DeviceMesh
from hyper_parallel.core.plan.model import ModelDescription

_COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "!=": operator.ne,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}


class Facts:
    """What conditions can ask for: each mesh axis by name, `ranks`, `model_class`, and plain values of the model's
    configuration, such as `model_type`."""

    def __init__(self, model: ModelDescription, mesh: DeviceMesh) -> None:
        plain = {key: value for key, value in model.config.items() if isinstance(value, (str, int, float, bool))}
        sizes = {axis: mesh.axis_size(axis) for axis in AXES}
        self.known: dict[str, Any] = {"model_type": None, **plain, "model_class": model.class_name, "ranks": mesh.size}
        self.known |= sizes

    def hold(self, conditions: Any, complain: Callable[[str], None]) -> bool:
        """Tell whether all conditions hold; calls `complain` with what is wrong with them."""
        if not isinstance(conditions, Mapping):
            complain(f"when: found {reprlib.repr(conditions)}, write a mapping such as {{tensor: '>1'}}")
            return False
        results = [self._holds(key, condition, complain) for key, condition in conditions.items()]
        return all(results)

    def _holds(self, key: Any, condition: Any, complain: Callable[[str], None]) -> bool:
        if key not in self.known:
            near = difflib.get_close_matches(key, self.known, n=1, cutoff=0.5) if isinstance(key, str) else []
            hint = (
                f"did you mean {near[0]}?"
                if near
                else f"write a mesh axis ({', '.join(AXES)}), model_type or model_class"
            )
            complain(f"when: nothing is known of {reprlib.repr(key)}; {hint}")
            return False
        found = self.known[key]
        if isinstance(condition, (list, tuple)):
            return bool([True for each in condition if self._one(key, found, each, complain)])
        return self._one(key, found, condition, complain)

    def _one(self, key: str, found: Any, condition: Any, complain: Callable[[str], None]) -> bool:
        if isinstance(condition, str) and (
            match := re.fullmatch(r"\s*(>=|<=|!=|==|>|<)\s*(.*?)\s*", condition, re.DOTALL)
        ):
            return self._compare(key, found, match.group(1), match.group(2), complain)
        if not isinstance(condition, (str, int, float)):
            complain(f"when.{key}: found {reprlib.repr(condition)}, write a value (2), a comparison ('>1') or a list")
            return False
        # In Python True equals 1, and a size is no truth value.
        return condition == found and isinstance(condition, bool) == isinstance(found, bool)

    def _compare(self, key: str, found: Any, sign: str, text: str, complain: Callable[[str], None]) -> bool:
        number = _number(text)
        if isinstance(found, (int, float)) and not isinstance(found, bool) and number is not None:
            return _COMPARISONS[sign](found, number)
        if sign in ("==", "!="):
            return _COMPARISONS[sign](str(found), text)
        complain(f"when.{key}: '{sign} {text[:40]}' compares numbers, and {key} is {reprlib.repr(found)}")
        return False


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
