"""LingBotCameraLoad: a camera path from .npy files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from comfy_api.latest import io, ui

from ...lingbot_core.camera.describe import describe_path
from ...lingbot_core.camera.formats.npy import load_camera_set
from ...lingbot_core.errors import InputFileError
from ..host.camera_files import in_input_folder, list_arrays, list_cameras, typed_path
from ..host.file_state import state_of
from ..sockets import Camera
from ..widgets import widgets_checked
from .inputs import CATEGORY

TYPED, BESIDE, DEFAULT = "(path below)", "beside the poses", "default"


class LingBotCameraLoad(io.ComfyNode):
    """poses.npy, intrinsics.npy and action.npy -> CAMERA."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LingBotCameraLoad",
            display_name="LingBot Load Camera",
            category=CATEGORY,
            description="Reads a camera path: poses [N, 4, 4], camera to world, OpenCV axes (+X right, +Y down, +Z "
            "forward), one per video frame, from a .npy file or a folder with poses.npy and perhaps intrinsics.npy and "
            "action.npy.",
            search_aliases=["poses", "npy", "trajectory", "camera path", "intrinsics", "extrinsics", "load poses"],
            inputs=[
                io.Combo.Input(
                    "file",
                    options=[TYPED, *list_cameras()],
                    default=TYPED,
                    tooltip="A .npy file of ComfyUI's input folder, or a folder in it that has a poses.npy (NAME/). "
                    "Press r to refresh the list after files were added.",
                ),
                io.String.Input(
                    "path",
                    default="",
                    optional=True,
                    tooltip="Where nothing is chosen above: the whole path of a folder with poses.npy, or of a .npy "
                    "file, on the machine that runs ComfyUI.",
                ),
                io.Combo.Input(
                    "intrinsics",
                    options=[BESIDE, DEFAULT, *list_arrays()],
                    default=BESIDE,
                    optional=True,
                    tooltip="fx, fy, cx, cy in pixels. beside the poses: the intrinsics.npy beside a poses.npy, if "
                    "there is one; default: 500 px and the picture's centre; or a file of the input folder.",
                ),
                io.Boolean.Input(
                    "actions",
                    default=True,
                    optional=True,
                    advanced=True,
                    tooltip="Also read the action.npy beside a poses.npy, for models that are steered by actions.",
                ),
                io.Int.Input(
                    "width",
                    default=832,
                    min=1,
                    max=65536,
                    optional=True,
                    advanced=True,
                    tooltip="Width in pixels of the picture that the intrinsics are stated for.",
                ),
                io.Int.Input(
                    "height",
                    default=480,
                    min=1,
                    max=65536,
                    optional=True,
                    advanced=True,
                    tooltip="Height in pixels of the picture that the intrinsics are stated for.",
                ),
            ],
            outputs=[
                Camera.Output("camera", display_name="camera", tooltip="The path, all of its poses."),
                io.Int.Output("frames", display_name="frames", tooltip="Poses of the path, one per video frame."),
                io.String.Output("text", display_name="text", tooltip="Length and steps of the path, and warnings."),
            ],
        )

    @classmethod
    def validate_inputs(cls, file: str | None = None, intrinsics: str | None = None) -> bool | str:
        """In place of the list that ComfyUI checks against, which is older than an upload."""
        try:
            for name in (file, intrinsics):
                if name not in (None, TYPED, BESIDE, DEFAULT):
                    in_input_folder(name)
        except InputFileError as error:
            return str(error)
        return True

    @classmethod
    def fingerprint_inputs(cls, file: Any = TYPED, path: Any = "", intrinsics: Any = BESIDE, **_: Any) -> Any:
        """Read again when a file has changed."""
        try:
            source = _source(file, path)
        except (InputFileError, AttributeError):
            return None
        folder = source if source.is_dir() else source.parent
        files = [source, *(folder / name for name in ("poses.npy", "intrinsics.npy", "action.npy"))]
        if intrinsics not in (None, BESIDE, DEFAULT):
            files.append(Path(in_input_folder(intrinsics)))
        return state_of(files)

    @classmethod
    @widgets_checked
    def execute(
        cls,
        file: str,
        path: str = "",
        intrinsics: str = BESIDE,
        actions: bool = True,
        width: int = 832,
        height: int = 480,
    ) -> io.NodeOutput:
        words = {BESIDE: "beside", DEFAULT: "default"}
        camera = load_camera_set(
            _source(file, path),
            intrinsics=words.get(intrinsics) or in_input_folder(intrinsics),
            actions=actions,
            width=width,
            height=height,
        )
        text = describe_path(camera)
        return io.NodeOutput(camera, len(camera), text, ui=ui.PreviewText(text))


def _source(file: str, path: str) -> Path:
    if file != TYPED:
        if path.strip():
            raise InputFileError(f"both the file {file!r} and a path are given; empty the path, or choose {TYPED!r}")
        return in_input_folder(file)
    if not path.strip():
        raise InputFileError("no camera is given; choose a file of the input folder, or type a path")
    return typed_path(path)
