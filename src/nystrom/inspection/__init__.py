"""How near approximations are to exact attention, on your model and data, and the cheapest that is near enough."""

from nystrom.inspection.inspect import InspectedLayer, Inspection, LayerMethod, WholeModel, inspect_model

__all__ = ["InspectedLayer", "Inspection", "LayerMethod", "WholeModel", "inspect_model"]
