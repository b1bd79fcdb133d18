"""C++ kernels, compiled for this processor or taken prebuilt from an image."""
