"""Kernels in CUDA C++, compiled for the GPU at hand by the compiler that comes with torch."""
