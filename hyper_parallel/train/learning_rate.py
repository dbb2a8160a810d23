"""The learning rate as a function of the step."""

from __future__ import annotations

import math

from hyper_parallel.train.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The rate of `step`, counted from 0, of `steps`.

    It rises in equal parts over `warmup_steps` to `learning_rate`, then follows half a cosine that reaches
    `min_learning_rate` in the last step.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    rest = steps - 1 - config.warmup_steps
    progress = (step - config.warmup_steps) / rest if rest > 0 else 0.0
    span = config.learning_rate - config.min_learning_rate
    return config.min_learning_rate + span * 0.5 * (1 + math.cos(math.pi * progress))
