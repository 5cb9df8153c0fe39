"""How close approximations are to exact attention on your model and data, and the cheapest within a budget."""

from nystrom.inspection.budget import choose_plan
from nystrom.inspection.chosen_heads import choose_exact_heads
from nystrom.inspection.inspect import InspectedLayer, Inspection, LayerMethod, inspect_model
from nystrom.inspection.whole_model import WholeModel

__all__ = [
    "InspectedLayer",
    "Inspection",
    "LayerMethod",
    "WholeModel",
    "choose_exact_heads",
    "choose_plan",
    "inspect_model",
]
