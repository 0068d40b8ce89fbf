"""A training loop that launches kernels on the stand-in runtime: loop.py SECONDS."""

import ctypes
import sys
import time


class Dim3(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))


class Kernel(ctypes.Structure):
    """As in kernels.h."""

    _fields_ = (("stub", ctypes.c_void_p), ("name", ctypes.c_char_p))


HOST_TO_DEVICE = 1
runtime = ctypes.CDLL("libcudart.so.13")
cuda_launch = runtime.cudaLaunchKernel
cuda_launch.argtypes = (ctypes.c_void_p, Dim3, Dim3, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
SCALE, ADD, FORWARD, FILL = (Kernel * 4).in_dll(ctypes.CDLL("libmodel.so"), "kernels")
batch = ctypes.create_string_buffer(65536)


def launch(kernel, blocks):
    cuda_launch(kernel.stub, Dim3(blocks, 1, 1), Dim3(128, 1, 1), None, 0, None)


def load_batch():
    time.sleep(0.005)
    runtime.cudaMemcpy(batch, batch, ctypes.c_size_t(len(batch)), HOST_TO_DEVICE)


def forward():
    for _ in range(12):
        launch(FORWARD, 64)
        launch(SCALE, 64)


def backward():
    for _ in range(24):
        launch(ADD, 64)


def step():
    launch(FILL, 1)
    runtime.cudaDeviceSynchronize()


end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    load_batch()
    forward()
    backward()
    step()
