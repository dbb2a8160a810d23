"""docs/rules.md lists every operator that has a rule."""

import re
from pathlib import Path

from hyper_parallel.core.rules import table

PAGE = Path(__file__).parents[3] / "docs/rules.md"


def test_the_page_lists_every_operator_of_the_table():
    listed = re.findall(r"`(\w+)`", PAGE.read_text().rpartition("## Canonical names")[2].partition("|---|---|")[2])
    built_in = {name for name, rule in table._RULES.items() if rule.function.__module__.startswith("hyper_parallel.")}
    assert sorted(listed) == sorted(built_in)
