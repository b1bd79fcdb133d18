"""One step through the model: on native CPU kernels, on a GPU, or in plain torch."""
