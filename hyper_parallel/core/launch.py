"""The place of this process among ranks that a launcher has started, from the environment that the launcher set.

- torchrun: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
- msrun: MS_ROLE=MS_WORKER, MS_WORKER_NUM, RANK_ID or MS_NODE_ID, DEVICE_ID, MS_SCHED_HOST, MS_SCHED_PORT;
  MS_ROLE=MS_SCHED for its scheduler, which runs the same command, joins as well, and ends inside of that
- a rank table: RANK_TABLE_FILE, RANK_ID, RANK_SIZE, DEVICE_ID
"""

from __future__ import annotations

import os
from typing import Mapping

from hyper_parallel.core.backend import Launch
from hyper_parallel.core.errors import ConfigError


def launch_from_environment(backend: str, environment: Mapping[str, str] | None = None) -> Launch:
    """How this process joins the others with `backend`; a `Launch` called "single" when no launcher has started it.

    `environment` is the process's own by default. Raises `ConfigError` when the launcher is not one for `backend`,
    or when a variable is missing or not a number.
    """
    environment = os.environ if environment is None else environment
    launcher = _launcher(backend, environment)
    return _READERS[launcher](_Variables(launcher, environment)) if launcher else Launch()


def is_scheduler(environment: Mapping[str, str]) -> bool:
    """Tell whether this is msrun's scheduler: it runs the workers' command but holds no rank."""
    return environment.get("MS_ROLE") == "MS_SCHED"


def is_further_rank(environment: Mapping[str, str]) -> bool:
    """Tell whether a launcher has started this process as another rank than the first."""
    if {"RANK", "WORLD_SIZE"} <= environment.keys():
        return environment["RANK"] != "0"
    if "MS_ROLE" in environment:
        return is_scheduler(environment) or environment.get("RANK_ID", environment.get("MS_NODE_ID")) != "0"
    return "RANK_TABLE_FILE" in environment and environment.get("RANK_ID", "0") != "0"


def _launcher(backend: str, environment: Mapping[str, str]) -> str | None:
    if backend == "torch":
        if "MS_ROLE" in environment:
            raise ConfigError("backend: msrun has started this process, but torch needs torchrun")
        return "torchrun" if {"RANK", "WORLD_SIZE"} <= environment.keys() else None
    if "TORCHELASTIC_RUN_ID" in environment:
        raise ConfigError("backend: torchrun has started this process, but mindspore needs msrun or a rank table")
    if environment.get("MS_ROLE") in ("MS_WORKER", "MS_SCHED"):
        return "msrun"
    return "rank_table" if {"RANK_TABLE_FILE", "RANK_ID"} <= environment.keys() else None


class _Variables:
    """A launcher's environment, with errors that name the variable."""

    def __init__(self, launcher: str, environment: Mapping[str, str]):
        self.launcher, self.environment = launcher, environment

    def text(self, *names: str) -> str:
        """The first of `names` that is set."""
        for name in names:
            if name in self.environment:
                return self.environment[name]
        raise ConfigError(f"{self.launcher} did not set {' or '.join(names)}, which tells a rank its place")

    def number(self, *names: str) -> int:
        """The first of `names` that is set, as a whole number."""
        text = self.text(*names)
        if not text.isdecimal():
            raise ConfigError(f"{self.launcher} set {' or '.join(names)} to {text!r}, which is not a whole number")
        return int(text)


def _from_torchrun(v: _Variables) -> Launch:
    port = v.number("MASTER_PORT")
    return Launch(
        v.number("RANK"), v.number("WORLD_SIZE"), v.number("LOCAL_RANK"), v.text("MASTER_ADDR"), port, "torchrun"
    )


def _from_msrun(v: _Variables) -> Launch:
    rank = v.number("RANK_ID", "MS_NODE_ID")
    # msrun leaves DEVICE_ID out when it binds devices another way; ranks of one machine are then consecutive.
    local = v.number("DEVICE_ID") if "DEVICE_ID" in v.environment else rank
    port = v.number("MS_SCHED_PORT")
    return Launch(rank, v.number("MS_WORKER_NUM"), local, v.text("MS_SCHED_HOST"), port, "msrun")


def _from_rank_table(v: _Variables) -> Launch:
    table = v.text("RANK_TABLE_FILE")
    if not os.path.isfile(table):
        raise ConfigError(f"RANK_TABLE_FILE names {table}, which is not a file")
    return Launch(v.number("RANK_ID"), v.number("RANK_SIZE"), v.number("DEVICE_ID"), launcher="rank_table")


_READERS = {"torchrun": _from_torchrun, "msrun": _from_msrun, "rank_table": _from_rank_table}
