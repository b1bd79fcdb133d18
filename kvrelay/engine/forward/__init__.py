"""One step through the model, on CPU kernels, on a GPU, or in plain torch."""
