"""Layout rules: for each operator, how its results lie when its arguments lie so.

`table.py` holds the table and what is the same for all operators. The other files hold the rules, one file for each
way in which results depend on arguments; importing this package fills the table.
"""

from hyper_parallel.core.rules import (
    attention,
    contraction,
    factory,
    gathering,
    indexing,
    normalisation,
    pointwise,
    random,
    reduction,
    shape,
    slicing,
)

__all__ = [
    "attention",
    "contraction",
    "factory",
    "gathering",
    "indexing",
    "normalisation",
    "pointwise",
    "random",
    "reduction",
    "shape",
    "slicing",
]
