"""LingBot World for ComfyUI: the folder that ComfyUI loads as a custom node pack.

This file is ComfyUI's front door. It imports nothing at module level, so that the test runner and other tools can
import it on a machine without ComfyUI. The work is done by ``lingbot_core``, which knows nothing of ComfyUI.
"""
