"""The options of parameter groups: which there are, and what they may be."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from math import isfinite
from typing import Any, Callable, Mapping, NamedTuple

from hyper_parallel.core.errors import ConfigError, HyperParallelError
from hyper_parallel.core.muon.newton_schulz import NewtonSchulz
from hyper_parallel.core.muon.scaling import scale_of

MUON, ADAMW = "muon", "adamw"
ALGORITHMS = (MUON, ADAMW)


@dataclass(frozen=True)
class NorMuon:
    """A second moment for each row of an orthogonalized update (NorMuon): rows of one size move alike.

    Args:
        beta2: how slowly it follows, from 0 to below 1.
        eps: what is added to its square root, above 0.
    """

    beta2: float = 0.95
    eps: float = 1e-10

    def __post_init__(self) -> None:
        if not (_is_number(self.beta2) and 0 <= self.beta2 < 1):
            raise ConfigError(f"NorMuon: beta2 is {self.beta2!r}; write a number from 0 to below 1, such as 0.95")
        if not (_is_number(self.eps) and self.eps > 0):
            raise ConfigError(f"NorMuon: eps is {self.eps!r}; write a number above 0, such as 1e-10")


class Option(NamedTuple):
    """What an option may be, as a test and in words. What is `planned` is fixed when the optimizer is made."""

    fits: Callable[[Any], bool]
    words: str
    planned: bool = False


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)


def _is_rate(value: Any) -> bool:
    """A number from 0 on, or a tensor of one, as a framework may keep a learning rate in."""
    if isinstance(value, (bool, str, bytes, type(None))):
        return False
    try:
        return isfinite(float(value)) and float(value) >= 0
    except (TypeError, ValueError, RuntimeError):
        return False


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value < 1


def _is_scale(value: Any) -> bool:
    try:
        return scale_of(value, (1, 1)) > 0
    except HyperParallelError:
        return False


def _is_pair_of_shares(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(map(_is_share, value))


_RATE = Option(_is_rate, "a number from 0 on")
_POSITIVE = Option(lambda value: _is_number(value) and value > 0, "a number above 0")
_FLAG = Option(lambda value: isinstance(value, bool), "True or False")
_CHECKED_BELOW = Option(lambda value: True, "")  # by NewtonSchulz, in words of its own

OPTIONS: Mapping[str, Mapping[str, Option]] = {
    MUON: {
        "lr": _RATE,
        "weight_decay": _RATE,
        "momentum": Option(_is_share, "a number from 0 to below 1"),
        "nesterov": _FLAG,
        "momentum_form": Option(lambda value: value in ("ema", "heavy_ball"), '"ema" or "heavy_ball"', planned=True),
        "coefficients": _CHECKED_BELOW._replace(planned=True),
        "steps": _CHECKED_BELOW._replace(planned=True),
        "ns_dtype": _CHECKED_BELOW._replace(planned=True),
        "ns_method": _CHECKED_BELOW._replace(planned=True),
        "eps": _CHECKED_BELOW._replace(planned=True),
        "scale": Option(_is_scale, '"match_rms", "original", "spectral", "unit_rms" or a number above 0'),
        "second_moment": Option(
            lambda value: value is None or isinstance(value, NorMuon), "None or hyper_parallel.NorMuon()", planned=True
        ),
    },
    ADAMW: {
        "lr": _RATE,
        "weight_decay": _RATE,
        "betas": Option(_is_pair_of_shares, "two numbers from 0 to below 1"),
        "eps": _POSITIVE,
    },
}
"""What a group of each algorithm may say."""


def check_options(algorithm: str, options: Mapping[str, Any], where: str) -> None:
    """Refuse what is no option of an algorithm, and values that an option can't have.

    Raises:
        ConfigError: names the option, what was found and what to write.
    """
    known = OPTIONS[algorithm]
    for name, value in options.items():
        if name not in known:
            close = get_close_matches(name, known, 1)
            instead = f"did you mean {close[0]!r}? " if close else ""
            raise ConfigError(f"{where}: {algorithm} has no option {name!r}; {instead}It has {', '.join(known)}")
        if not known[name].fits(value):
            raise ConfigError(f"{where}: {name} is {value!r}; write {known[name].words}")
    if algorithm == MUON:
        settings_of(options)


def check_free_options(group: Mapping[str, Any], where: str) -> None:
    """Refuse what a group's options that no plan fixes have been changed to, if they can't be that.

    Tensors are left alone: to look at one would be to wait for the device. A schedule may end a rounding below zero.

    Raises:
        ConfigError: names the option, what was found and what to write.
    """
    for name, option in OPTIONS[group["algorithm"]].items():
        if option.planned:
            continue
        if name not in group:
            raise ConfigError(f"{where} has no {name} any more; write {option.words}")
        value = group[name]
        if not hasattr(value, "shape") and not (_is_number if option is _RATE else option.fits)(value):
            raise ConfigError(f"{where}: {name} is {value!r}; write {option.words}")


def settings_of(options: Mapping[str, Any]) -> NewtonSchulz:
    """The orthogonalization that the options of a Muon group ask for; what is not said is as usual."""
    names = {"coefficients": "coefficients", "steps": "steps", "ns_dtype": "dtype", "ns_method": "method", "eps": "eps"}
    return NewtonSchulz(**{name: options[option] for option, name in names.items() if option in options})


def planned_values(algorithm: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are fixed with the plan."""
    return {name: options[name] for name, option in OPTIONS[algorithm].items() if option.planned}
