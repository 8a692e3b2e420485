"""Where a run may be sent, beside its folder: TensorBoard, Weights & Biases, Trackio, MLflow, or
one of your own.
"""
