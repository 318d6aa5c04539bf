"""What the native CPU kernels share: building, loading, threads. The kernels themselves are `kernels/<op>/cpu.cpp`."""
