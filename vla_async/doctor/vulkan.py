"""Ask Vulkan which devices there are, with nothing but the standard library. As a program, it prints them as JSON."""

from __future__ import annotations

import ctypes
import json
from dataclasses import asdict, dataclass

VULKAN_1_1 = 1 << 22 | 1 << 12  # the first version that tells a driver's name and version
CPU_DEVICE = 4  # VK_PHYSICAL_DEVICE_TYPE_CPU


class _ApplicationInfo(ctypes.Structure):
    """VkApplicationInfo."""

    _fields_ = (
        ("structure_type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("name_and_version", ctypes.c_uint64 * 2),
        ("engine_name", ctypes.c_void_p),
        ("engine_version", ctypes.c_uint32),
        ("api_version", ctypes.c_uint32),
    )


class _InstanceInfo(ctypes.Structure):
    """VkInstanceCreateInfo without layers or extensions."""

    _fields_ = (
        ("structure_type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("flags", ctypes.c_uint32),
        ("application", ctypes.c_void_p),
        ("layers_and_extensions", ctypes.c_uint64 * 4),
    )


class _DriverProperties(ctypes.Structure):
    """VkPhysicalDeviceDriverProperties."""

    _fields_ = (
        ("structure_type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("driver", ctypes.c_uint32),
        ("name", ctypes.c_char * 256),
        ("info", ctypes.c_char * 256),
        ("conformance", ctypes.c_uint8 * 4),
    )


class _DeviceProperties(ctypes.Structure):
    """VkPhysicalDeviceProperties2, of which only the device type is read."""

    _fields_ = (
        ("structure_type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("versions_and_ids", ctypes.c_uint32 * 4),
        ("device_type", ctypes.c_uint32),
        ("rest", ctypes.c_uint8 * 2048),
    )


@dataclass(frozen=True)
class VulkanDevice:
    """What a Vulkan driver says of one device; ``driver`` is for example ``Mesa 25.0.7-2 (LLVM 19.1.7)``."""

    is_cpu: bool
    driver: str


def vulkan_devices() -> list[VulkanDevice]:
    """Ask Vulkan itself, so that any vendor's driver counts, wherever it came from."""
    try:
        vulkan = ctypes.CDLL("libvulkan.so.1")
    except OSError:
        return []
    application = _ApplicationInfo(structure_type=0, api_version=VULKAN_1_1)
    info = _InstanceInfo(structure_type=1, application=ctypes.addressof(application))
    instance, count = ctypes.c_void_p(), ctypes.c_uint32()
    if vulkan.vkCreateInstance(ctypes.byref(info), None, ctypes.byref(instance)) != 0:
        return []  # no driver at all
    vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), None)
    handles = (ctypes.c_void_p * count.value)()
    vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), handles)
    devices = []
    for handle in handles:
        driver = _DriverProperties(structure_type=1000196000)
        device = _DeviceProperties(structure_type=1000059001, next=ctypes.addressof(driver))
        vulkan.vkGetPhysicalDeviceProperties2(ctypes.c_void_p(handle), ctypes.byref(device))
        devices.append(VulkanDevice(device.device_type == CPU_DEVICE, driver.info.decode(errors="replace")))
    vulkan.vkDestroyInstance(instance, None)
    return devices


if __name__ == "__main__":
    print(json.dumps([asdict(device) for device in vulkan_devices()]))
