"""Export of models to torch.export programs and ONNX."""
