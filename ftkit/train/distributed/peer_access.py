"""Which GPUs reach each other's memory, and may count on what they write there."""

from __future__ import annotations

import ctypes

import torch

DRIVER = "libcuda.so.1"
NATIVE_ATOMICS = 3
"""CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED of the CUDA driver's API."""


def reaches(device: int, peer: int) -> bool:
    """Tell whether a GPU reaches another's memory with atomics, as over NVLink.

    Without atomics, as over most PCIe, ranks could copy, but not wait for each other. torch does not tell, the driver
    does.
    """
    return torch.cuda.can_device_access_peer(device, peer) and _has_native_atomics(device, peer)


def _has_native_atomics(device: int, peer: int) -> bool:
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return False
    handles, answer = (ctypes.c_int(), ctypes.c_int()), ctypes.c_int()
    statuses = [
        driver.cuDeviceGet(ctypes.byref(handle), one) for handle, one in zip(handles, (device, peer), strict=True)
    ]
    statuses.append(driver.cuDeviceGetP2PAttribute(ctypes.byref(answer), NATIVE_ATOMICS, *handles))
    return not any(statuses) and answer.value == 1
