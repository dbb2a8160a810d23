"""What an optimizer that is planned can't do, in the words of both backends."""

from __future__ import annotations

from typing import NoReturn

from hyper_parallel.core.errors import ConfigError

NO_COPY = (
    "a Muon optimizer can't be copied or pickled: it holds this rank's part of a plan. Keep state_dict(), for the same "
    "ranks, or full_state()"
)


def refuse_copy() -> NoReturn:
    """Say why an optimizer can't be copied."""
    raise ConfigError(NO_COPY)


def refuse_new_group() -> NoReturn:
    """Say why a group can't be added later."""
    raise ConfigError(
        "Muon: no group can be added once the optimizer is made, for who orthogonalizes what is planned for all "
        "parameters together; make a new optimizer with all groups, and give it full_state() of this one"
    )
