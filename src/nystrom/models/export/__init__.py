"""Models as ONNX programs."""
