"""C++ kernels, compiled for this processor or taken from an image."""
