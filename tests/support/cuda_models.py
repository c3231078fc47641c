"""CUDA for Python models in tests, where no framework is installed."""

MADE = """
import ctypes

from conch.core import dlpack
from conch.memory.cuda import cuda_devices


class Made:
    'Memory that a framework would have allocated on a device.'

    freed = 0

    def __init__(self, values, device, pool=False):
        self.device, self.shape = device, values.shape
        self.gpu = cuda_devices().device(device)
        memory = ctypes.c_uint64()
        if pool:
            memory.value = self.gpu.allocate(values.nbytes + 256)
        else:
            with self.gpu.current():
                library = ctypes.CDLL("libcuda.so.1")
                assert not library.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(values.nbytes + 256))
        self.pool, self.base, self.pointer = pool, memory.value, memory.value + 256
        self.gpu.copy([(self.pointer, values.ctypes.data, values.nbytes)])

    def __dlpack_device__(self):
        return 2, self.device

    def __dlpack__(self, stream=None):
        return dlpack.export(self.pointer, (2, self.device), "FP32", self.shape, self)

    def __del__(self):
        Made.freed += 1
        if not self.pool:
            with self.gpu.current():
                ctypes.CDLL("libcuda.so.1").cuMemFree_v2(ctypes.c_uint64(self.base))
"""
"""A class with memory as frameworks allocate it on a device, or take it from a pool of the driver's."""
