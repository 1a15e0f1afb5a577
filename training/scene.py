"""A procedural world without an end: things on a flat torus, hidden at the wrap by fog.

Axes are those of the cameras (+X right, +Y down, +Z forward), the ground is y = 0 and a camera stands at
y = -``EYE``. One unit of the key steps is ``STRIDE`` lengths here. Everything is a function of integer seeds, on any
device alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from .styles import CROWN, OBJECT_COLOURS, OBJECTS, TRUNK, palettes

PERIOD = 12.0
# A walking pace: a second of W (0.8 units) passes a little more than the height of the eyes.
STRIDE = 0.65
EYE = 0.45
FOG_BEGIN, FOG_END = 2.6, 5.9
NEAR = 0.03

# The upstream pose files' camera, in pixels of 832 x 480.
INTRINSICS = (502.9, 502.9, 416.0, 240.0)
INTRINSICS_SIZE = (832, 480)

TREES, BALLS, BOXES, PILLARS = 7, 5, 8, 4
ITEMS = TREES + BALLS + BOXES + PILLARS
# Order of the primitives: spheres (crowns, balls), boxes, cylinders (trunks, pillars).
SPHERE_COUNT, BOX_COUNT, CYLINDER_COUNT = TREES + BALLS, BOXES, TREES + PILLARS
PRIMITIVES = SPHERE_COUNT + BOX_COUNT + CYLINDER_COUNT
BOX_BEGIN, CYLINDER_BEGIN = SPHERE_COUNT, SPHERE_COUNT + BOX_COUNT

_CELLS = 7  # of the placement grid, per side
PHASES = 12
FRAME = 20 + PHASES
SUN_ELEVATION = 0.42


@dataclass(frozen=True, eq=False)
class Scenes:
    """B scenes of PRIMITIVES each.

    centre: [B, N, 3]. half: half extents [B, N, 3]; a sphere's radius thrice, a cylinder's radius, half height, radius.
    turn: cos and sin of the yaw [B, N, 2]. colour: row of the palette, int64 [B, N]. reach: how far the whole thing
    extends from its middle in the ground plane [B, N]. phases: of hills, clouds, meadows and sun [B, PHASES] in 0..1.
    """

    centre: Tensor
    half: Tensor
    turn: Tensor
    colour: Tensor
    reach: Tensor
    phases: Tensor

    def __len__(self) -> int:
        return len(self.centre)

    def __getitem__(self, index: slice | Tensor) -> Scenes:
        return Scenes(*(getattr(self, f.name)[index] for f in fields(self)))

    def to(self, device: torch.device | str) -> Scenes:
        return Scenes(*(getattr(self, f.name).to(device) for f in fields(self)))


def uniform(seeds: Tensor, count: int, stream: int) -> Tensor:
    """Numbers in [0, 1) from a hash of (seed, stream, index): float32 [B, count], the same on every device."""
    index = torch.arange(count, device=seeds.device, dtype=torch.int64)
    # splitmix64; products of int64 wrap around, and the masks make the shifts logical.
    x = (
        seeds.to(torch.int64)[:, None] * -7046029254386353131
        + index * -4658895280553007687
        + stream * 76408915769560128
    )
    for shift, mask, factor in ((30, (1 << 34) - 1, -4658895280553007687), (27, (1 << 37) - 1, -7723592293110705685)):
        x = (x ^ ((x >> shift) & mask)) * factor
    x = x ^ ((x >> 31) & ((1 << 33) - 1))
    return ((x >> 40) & 0xFFFFFF).to(torch.float32) / float(1 << 24)


def random_scenes(seeds: Tensor | list[int], device: torch.device | str = "cpu") -> Scenes:
    """One scene per seed."""
    seeds = torch.as_tensor(seeds, dtype=torch.int64).to(device)
    batch = len(seeds)
    cells = uniform(seeds, _CELLS**2, 1).argsort(dim=1)[:, :ITEMS]
    spot = torch.stack([cells % _CELLS, cells // _CELLS], dim=-1).to(torch.float32)
    jitter = uniform(seeds, ITEMS * 2, 2).view(batch, ITEMS, 2)
    spot = (spot + 0.5 + (jitter - 0.5) * 0.5) * (PERIOD / _CELLS)
    r = uniform(seeds, ITEMS * 4, 3).view(batch, ITEMS, 4)

    def between(low: float, high: float, u: Tensor) -> Tensor:
        return low + (high - low) * u

    tree, ball, box, pillar = (slice(a, b) for a, b in _spans((TREES, BALLS, BOXES, PILLARS)))
    trunk_height = between(0.38, 0.75, r[:, tree, 0])
    crown = between(0.24, 0.42, r[:, tree, 1])
    trunk = between(0.05, 0.08, r[:, tree, 2])
    radius = between(0.13, 0.42, r[:, ball, 0])
    # A third of the boxes are towers, so that something large stands near in most views.
    tower = (r[:, box, 3] < 0.35).float()
    box_half = torch.stack(
        [
            between(0.16, 0.42, r[:, box, 0]),
            between(0.13, 0.40, r[:, box, 1]) * (1 + 1.9 * tower),
            between(0.16, 0.42, r[:, box, 2]),
        ],
        dim=-1,
    )
    pillar_radius = between(0.08, 0.20, r[:, pillar, 0])
    pillar_height = between(0.25, 0.85, r[:, pillar, 1])

    half = torch.cat(
        [
            crown[..., None].expand(-1, -1, 3),
            radius[..., None].expand(-1, -1, 3),
            box_half,
            torch.stack([trunk, trunk_height / 2, trunk], dim=-1),
            torch.stack([pillar_radius, pillar_height, pillar_radius], dim=-1),
        ],
        dim=1,
    )
    where = torch.cat([spot[:, tree], spot[:, ball], spot[:, box], spot[:, tree], spot[:, pillar]], dim=1)
    height = torch.cat(
        [
            trunk_height + crown * 0.75,
            radius,
            box_half[..., 1],
            trunk_height / 2,
            pillar_height,
        ],
        dim=1,
    )
    centre = torch.stack([where[..., 0], -height, where[..., 1]], dim=-1)
    footprint = (box_half[..., 0] ** 2 + box_half[..., 2] ** 2).sqrt()
    reach = torch.cat([crown, radius, footprint, crown, pillar_radius], dim=1)
    angle = uniform(seeds, PRIMITIVES, 4) * (torch.pi / 2)
    turn = torch.stack([angle.cos(), angle.sin()], dim=-1)
    colour = OBJECTS + (uniform(seeds, PRIMITIVES, 5) * OBJECT_COLOURS).to(torch.int64)
    colour[:, :TREES] = CROWN
    colour[:, CYLINDER_BEGIN : CYLINDER_BEGIN + TREES] = TRUNK
    return Scenes(centre, half, turn, colour, reach, uniform(seeds, PHASES, 6))


def _spans(counts: tuple[int, ...]) -> list[tuple[int, int]]:
    spans, begin = [], 0
    for count in counts:
        spans.append((begin, begin + count))
        begin += count
    return spans


def wrapped(offset: Tensor) -> Tensor:
    """The shortest way round the torus: each coordinate within half a period."""
    return offset - PERIOD * torch.round(offset / PERIOD)


def clear_path(scenes: Scenes, c2w: Tensor, margin: float = 0.5) -> Scenes:
    """Makes way for a camera path [B, T, 4, 4]: things near it shrink, and vanish where it goes through them."""
    path = c2w[:, :, :3, 3].to(scenes.centre)
    distance = torch.full(scenes.reach.shape, PERIOD, device=scenes.reach.device)
    for t in range(path.shape[1]):  # one frame at a time: [B, N] instead of [B, T, N] in memory
        x = wrapped(scenes.centre[..., 0] - path[:, t, None, 0])
        z = wrapped(scenes.centre[..., 2] - path[:, t, None, 2])
        distance = torch.minimum(distance, (x * x + z * z).sqrt())
    scale = ((distance - margin) / scenes.reach).clamp(0, 1)
    scale = torch.where(scale < 0.35, torch.zeros_like(scale), scale)
    centre = scenes.centre * torch.stack([torch.ones_like(scale), scale, torch.ones_like(scale)], dim=-1)
    return replace(scenes, centre=centre, half=scenes.half * scale[..., None], reach=scenes.reach * scale)


@dataclass(frozen=True, eq=False)
class View:
    """What both renderers start from, for F frames.

    frame: [F, FRAME]: rotation row by row (9), height of the camera above the ground, its place on the torus (x, z),
    1 / fx, 1 / fy, cx, cy in pixels, a pixel's angle, the direction to the sun (3), the phases in radians. rel:
    centres from the camera [F, N, 3]. box: the part of the picture that a thing and its shadow can touch, in pixels
    x0, x1, y0, y1 [F, N, 4], empty if none. scene: row of the scenes [F]. palette: [F, ROWS + 1, 3].
    """

    frame: Tensor
    rel: Tensor
    box: Tensor
    scene: Tensor
    palette: Tensor


def view(
    scenes: Scenes, c2w: Tensor, style: Tensor, height: int, width: int, intrinsics: tuple[float, ...] | Tensor
) -> View:
    """Flattens [B, T] cameras to F = B * T frames.

    c2w: [B, T, 4, 4]. style: int [B], int [B, T] or palettes [B, T, ROWS + 1, 3]. intrinsics: fx, fy, cx, cy at
    832x480.
    """
    device = scenes.centre.device
    batch, frames = c2w.shape[:2]
    # Places on the torus are reduced in the precision that came in: a long walk must not lose digits.
    cameras = c2w.to(device).reshape(-1, 4, 4)
    place = cameras[:, :3, 3]
    ground = torch.remainder(place[:, [0, 2]], PERIOD).to(torch.float32)
    rotation = cameras[:, :3, :3].to(torch.float32)
    scene = torch.arange(batch, device=device).repeat_interleave(frames)
    numbers = torch.as_tensor(intrinsics, dtype=torch.float32).tolist()
    sx, sy = width / INTRINSICS_SIZE[0], height / INTRINSICS_SIZE[1]
    fx, fy, cx, cy = numbers[0] * sx, numbers[1] * sy, numbers[2] * sx, numbers[3] * sy

    centre, half = scenes.centre[scene], scenes.half[scene]
    eye = -place[:, 1].to(torch.float32)
    rel = torch.stack(
        [
            wrapped(centre[..., 0] - ground[:, None, 0]),
            centre[..., 1] + eye[:, None],
            wrapped(centre[..., 2] - ground[:, None, 1]),
        ],
        dim=-1,
    )
    rest = torch.tensor([1 / fx, 1 / fy, cx, cy, 1 / fx], device=device).expand(len(scene), 5)
    phases = scenes.phases[scene] * (2 * torch.pi)
    flat, up = math.cos(SUN_ELEVATION), math.sin(SUN_ELEVATION)
    sun = torch.stack([phases[:, 0].sin() * flat, torch.full_like(eye, -up), phases[:, 0].cos() * flat], dim=1)
    frame = torch.cat([rotation.reshape(-1, 9), eye[:, None], ground, rest, sun, phases], dim=1)

    # Bounding spheres of the thing and of its shadow, whichever is larger on each side.
    radius = half.norm(dim=-1)
    radius[:, :SPHERE_COUNT] = half[:, :SPHERE_COUNT, 0]
    reach = shadow_radius(scenes.reach)[scene]
    base = torch.stack([rel[..., 0], eye[:, None].expand_as(reach), rel[..., 2]], dim=-1)
    a = _bounds(rel, radius, rotation, fx, fy, cx, cy)
    b = _bounds(base, reach, rotation, fx, fy, cx, cy)
    box = torch.stack(
        [
            torch.minimum(a[0], b[0]).clamp(min=0),
            torch.maximum(a[1], b[1]).clamp(max=width),
            torch.minimum(a[2], b[2]).clamp(min=0),
            torch.maximum(a[3], b[3]).clamp(max=height),
        ],
        dim=-1,
    )
    far = (rel[..., 0] ** 2 + rel[..., 2] ** 2).sqrt() - torch.maximum(radius, reach) > FOG_END
    gone = far | (scenes.reach[scene] <= 0)
    box = torch.where(gone[..., None], torch.tensor([1e6, -1e6, 1e6, -1e6], device=device), box)

    if style.dim() >= 3:
        palette = style.reshape(batch * frames, *style.shape[-2:]).to(device, torch.float32)
    else:
        rows = style if style.dim() == 2 else style[:, None].expand(batch, frames)
        palette = palettes(device)[rows.to(device).reshape(-1)]
    return View(frame, rel, box, scene, palette)


def shadow_radius(reach: Tensor) -> Tensor:
    """How far the soft shadow on the ground extends."""
    return reach * 1.25 + 0.04


def _bounds(
    centre: Tensor, radius: Tensor, rotation: Tensor, fx: float, fy: float, cx: float, cy: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pixels x0, x1, y0, y1 [F, N] around spheres seen by cameras; everything for those that the camera is close to."""
    local = torch.einsum("fnk,fkj->fnj", centre, rotation)
    x, y, z = local.unbind(-1)
    near, far = (z - radius).clamp(min=NEAR), z + radius
    crossing, behind = (z - radius) < 2 * NEAR, far < NEAR
    out = []
    for middle, f, c in ((x, fx, cx), (y, fy, cy)):
        low, high = middle - radius, middle + radius
        low = torch.where(low < 0, low / near, low / far.clamp(min=NEAR)) * f + c - 1
        high = torch.where(high > 0, high / near, high / far.clamp(min=NEAR)) * f + c + 1
        low = torch.where(crossing, torch.full_like(low, -1e6), low)
        high = torch.where(crossing, torch.full_like(high, 1e6), high)
        out += [
            torch.where(behind, torch.full_like(low, 1e6), low),
            torch.where(behind, torch.full_like(low, -1e6), high),
        ]
    return out[0], out[1], out[2], out[3]


def render(
    scenes: Scenes,
    c2w: Tensor,
    style: Tensor,
    height: int = 96,
    width: int = 160,
    intrinsics: tuple[float, ...] | Tensor = INTRINSICS,
) -> Tensor:
    """Pictures uint8 [B, T, 3, height, width], by the Triton kernel on a GPU and by numpy on a CPU.

    c2w: camera-to-world [B, T, 4, 4]. style: int [B] or [B, T], or palettes [B, T, ROWS + 1, 3] (``clips.fades``).
    """
    seen = view(scenes, c2w, style, height, width, intrinsics)
    if scenes.centre.is_cuda:
        from .render_triton import render_view
    else:
        from .render_numpy import render_view
    return render_view(scenes, seen, height, width).view(*c2w.shape[:2], 3, height, width)
