"""The native column of the operator table: C++ kernels for the CPU, one module per instruction set."""
