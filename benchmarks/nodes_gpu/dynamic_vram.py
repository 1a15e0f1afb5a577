"""Switches DynamicVRAM on as ComfyUI's main.py does: in two steps, of which the first comes before PyTorch."""

from __future__ import annotations

from .report import NotHereError


def init_library() -> None:
    """As ComfyUI's main.py begins; before PyTorch is imported. Raises NotHereError."""
    try:
        import comfy_aimdo.control
    except ImportError as error:
        raise NotHereError(f"comfy-aimdo cannot be imported: {error}") from error
    if not comfy_aimdo.control.init(simple_vram_headroom=None, nvml_pressure=True):
        raise NotHereError("comfy_aimdo.control.init() could not load its library")


def init_devices(headroom: float) -> None:
    """As ComfyUI's main.py goes on, once models can be managed. headroom: --vram-headroom, GiB.

    Raises NotHereError.
    """
    import comfy.memory_management
    import comfy.model_management
    import comfy.model_patcher
    import comfy_aimdo.control

    devices = comfy.model_management.get_all_torch_devices()
    if not comfy_aimdo.control.init_devices((device.index or 0, int(headroom * 2**30)) for device in devices):
        raise NotHereError("comfy_aimdo.control.init_devices() found no device that it can manage")
    comfy_aimdo.control.set_log_warning()
    comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic
    comfy.memory_management.aimdo_enabled = True
