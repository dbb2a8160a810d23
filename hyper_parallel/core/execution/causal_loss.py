"""The loss inside of a model: Hugging Face's models compute it from logits that are a part of the vocabulary here."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.backend import Backend, Module, Tensor
from hyper_parallel.core.errors import ConfigError
from hyper_parallel.core.execution.adaptations import Adaptations
from hyper_parallel.core.execution.facts import Facts, is_cut, is_in
from hyper_parallel.core.execution.loss import planned_cross_entropy
from hyper_parallel.core.placement import Shard
from hyper_parallel.core.plan.contracts import FEATURES, BoundaryPlan
from hyper_parallel.core.plan.model_json import config_of
from hyper_parallel.core.plan.plan import ShardingPlan

KINDS = ("ForCausalLM", "ForConditionalGeneration", None)
"""What a model's `loss_type` says when its loss is the cross entropy of each next token. None is that of models whose
class is named after no loss (GPT2LMHeadModel): they take this one."""

BALANCE = "output_router_logits"
"""The configuration's key that adds a loss on the routers' scores."""


class CausalLoss:
    """Stands in for such a model's `loss_function`, with the same arguments and the same value."""

    def __init__(self, backend: Backend, plan: ShardingPlan):
        self._backend = backend
        self._plan = plan

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int | None = None,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The mean over the tokens that count, or their sum over `num_items_in_batch`. Labels are shifted here, unless
        `shift_labels` are given. The size of the vocabulary is the plan's, whatever the model says."""
        if shift_labels is None:
            logits, shift_labels = logits[..., :-1, :], labels[..., 1:]
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = planned_cross_entropy(self._backend, self._plan, logits, shift_labels, reduction, ignore_index)
        return loss if num_items_in_batch is None else loss / num_items_in_batch


class NoBalanceLoss:
    """Refuses calls for training that ask a model for its loss on routers' scores."""

    def __init__(self, backend: Backend, module: Module, ranks: int):
        self._backend = backend
        self._config = getattr(module, "config", None)
        self._ranks = ranks

    def __call__(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments as they are.

        Raises:
            ConfigError: the call, or the configuration as it is now, asks for that loss, and operations are recorded.
        """
        asked = kwargs.get(BALANCE)
        if asked is None:
            asked = getattr(self._config, BALANCE, False)
        if asked and self._backend.autograd.grad_enabled():
            raise ConfigError(
                f"the model is called with {BALANCE}=True, whose balance loss would count {self._ranks} times in the "
                "gradient of each router where tensor cuts the experts; leave it out, or keep the experts on every "
                "tensor rank"
            )
        return args, kwargs


def find_losses(facts: Facts, found: Adaptations) -> None:
    """Have models that compute their loss themselves compute it from a part of the vocabulary.

    A loss on routers' scores is refused beside cut experts: every tensor rank has all scores, and a part of the
    gradient of what they are used for, so that a gradient which is whole already would count once for each rank.
    """
    heads = [each.module for each in facts.plan.boundaries if each.kind == "head" and _is_cut(each)]
    cut = any(is_cut(each) and each.role.startswith("expert") for each in facts.plan.parameters)
    scored = BALANCE in config_of(facts.model)
    for name, module in facts.modules.items():
        attributes = vars(module)
        if attributes.get("loss_type", "") not in KINDS:
            continue
        if cut and scored:
            found.arguments.setdefault(name, []).append(NoBalanceLoss(facts.backend, module, facts.ranks))
        if "_loss_function" not in attributes and any(is_in(head, name) for head in heads):
            found.show(module, "_loss_function", CausalLoss(facts.backend, facts.plan))
    if cut and config_of(facts.model).get(BALANCE):
        found.problems.append(
            f"the configuration has {BALANCE}=true, whose balance loss would count {facts.ranks} times where tensor "
            "cuts the experts; set it to false"
        )


def _is_cut(head: BoundaryPlan) -> bool:
    """Tell whether a rank has logits of a part of the vocabulary."""
    return Shard(FEATURES) in head.outputs[0].after.values()
