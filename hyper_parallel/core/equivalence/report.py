"""What a check of gradients has found, for people and for programs."""

from __future__ import annotations

from dataclasses import dataclass

from hyper_parallel.core.equivalence.compare import Difference, Error, told

_SHOWN = 12


@dataclass(frozen=True)
class ParameterErrors:
    """How far the gradient of a parameter is off in each mode; None where the mode did not run. `largest` is the
    largest element on one device."""

    name: str
    largest: float
    production: Error | None
    validation: Error | None

    @property
    def worst(self) -> float:
        """The larger of the relative errors."""
        return max((each.relative for each in (self.production, self.validation) if each is not None), default=0.0)


@dataclass(frozen=True)
class GradientReport:
    """One step in production, in validation and on one device.

    `losses` are by "one device", "production" and "validation". `bound` is what relative errors may be, `why` says why
    it is that. `first_value` is the first boundary in the order of the forward whose value differs in production,
    `first_gradient` the first in the order of backward whose gradient does. `refused` is what validation said where it
    stopped, `failed` what production said; "" where they ran.
    """

    model_class: str
    mesh: str
    dtype: str
    bound: float
    why: str
    losses: dict[str, float]
    parameters: tuple[ParameterErrors, ...]
    first_value: Difference | None = None
    first_gradient: Difference | None = None
    refused: str = ""
    failed: str = ""

    @property
    def ok(self) -> bool:
        """Both modes ran, and every number is that of one device within the bound."""
        stopped = self.refused or self.failed
        return not stopped and not self.first_value and not self.first_gradient and self.is_equal

    @property
    def is_equal(self) -> bool:
        """The loss and every gradient are those of one device, in the modes that ran."""
        whole = self.losses["one device"]
        losses = all(abs(each - whole) <= self.bound * max(abs(whole), self.bound) for each in self.losses.values())
        return losses and all(each.worst <= self.bound for each in self.parameters)

    @property
    def worst(self) -> ParameterErrors | None:
        """The parameter whose gradient is off most."""
        return max(self.parameters, key=lambda each: each.worst, default=None)

    def table(self, full: bool = False) -> str:
        """Losses, then every parameter that is off and the worst of the others (all of them if `full`), and the
        verdict."""
        wrong = [each for each in self.parameters if not each.worst <= self.bound]
        others = sorted((each for each in self.parameters if each.worst <= self.bound), key=lambda each: -each.worst)
        shown = list(self.parameters) if full else (wrong + others)[: max(len(wrong), _SHOWN)]
        width = max((len(each.name) for each in shown), default=0)
        lines = [f"{'loss, ' + name:<{width}}  {value:.12g}" for name, value in self.losses.items()]
        lines += ["", f"{'gradient of':<{width}}  {'largest':>9}  {'production':>21}  {'validation':>21}"]
        lines += [self._line(each, width) for each in shown]
        if len(shown) < len(self.parameters):
            lines.append(f"and {len(self.parameters) - len(shown)} more that are off less")
        return "\n".join([*lines, "", str(self)])

    def _line(self, each: ParameterErrors, width: int) -> str:
        modes = "".join(f"  {_cell(error):>21}" for error in (each.production, each.validation))
        return f"{each.name:<{width}}  {each.largest:>9.2e}{modes}"

    def __str__(self) -> str:
        about = f"{self.model_class} on {self.mesh}, in {self.dtype}, bound {self.bound:g} ({self.why})"
        lines = [f"{about}: {'every number is that of one device' if self.ok else 'this is not the model'}"]
        if self.failed:
            lines.append(f"production stopped: {self.failed}")
        if self.refused:
            lines.append(f"validation stopped: {self.refused}")
        worst = self.worst
        if worst is not None and (worst.production or worst.validation):
            mode = "production" if worst.production and worst.production.relative == worst.worst else "validation"
            lines.append(f"worst gradient: {worst.name}, {told(getattr(worst, mode))}, in {mode}")
        if self.first_value:
            lines.append(f"first value that differs in the forward: {self.first_value}")
        if self.first_gradient:
            lines.append(f"first gradient that differs in backward: {self.first_gradient}")
        return "\n".join(lines)


def _cell(error: Error | None) -> str:
    return "did not run" if error is None else f"{error.absolute:.2e} ({error.relative:.1e})"
