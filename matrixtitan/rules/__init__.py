"""The rules that step hidden matrices, by the name that `optimizer.name` takes.

A new rule is a file here, a line in RULES and an optimizer class; the config, the planner, the
checkpoints and the tools read what it declares. Read `base.py` first.
"""

from matrixtitan.rules.adamw import AdamWRule
from matrixtitan.rules.base import Rule, StateSpec
from matrixtitan.rules.muon import MuonRule
from matrixtitan.rules.shampoo import ShampooRule
from matrixtitan.rules.soap import SOAPRule

RULES: dict[str, type[Rule]] = {
    rule.name: rule for rule in (MuonRule, ShampooRule, SOAPRule, AdamWRule)
}

__all__ = ["RULES", "AdamWRule", "MuonRule", "Rule", "SOAPRule", "ShampooRule", "StateSpec"]
