"""Renders the start images of the examples: two small landscapes, made from nothing but noise and arithmetic.

Usage: python examples/render_start_images.py [--out FOLDER]

Everything in a scene is one height field (ground, walls, towers, trees) with a colour per cell, seen through the
intrinsics of the examples' camera files and lit by one sun. Axes here: x right, y up, z forward; one unit is about a
metre and a half. The same seed gives the same picture.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Colour = tuple[float, float, float]

WIDTH, HEIGHT = 832, 480
FOCAL, CX, CY = 415.6, 415.8, 239.8  # the intrinsics of the pose files
SUPERSAMPLE = 3
CELL = 0.05
X_MIN, X_MAX, Z_MIN, Z_MAX = -45.0, 45.0, -4.0, 116.0
SHAPE = (round((Z_MAX - Z_MIN) / CELL), round((X_MAX - X_MIN) / CELL))


@dataclass(frozen=True)
class Light:
    """Sun and air. Colours are linear RGB; fog is the distance at which about two thirds of a colour are gone."""

    sun: Colour
    sun_colour: Colour
    zenith: Colour
    horizon: Colour
    ambient: Colour
    fog: float
    clouds: float
    mountains: Colour
    mountain_height: float


@dataclass(frozen=True)
class Scene:
    """A height field [Z, X] with a colour [Z, X, 3] and stone courses where ``stone`` [Z, X] is 1.

    gates: dark arches in stone faces that look towards -z, as (x, bottom, z, half width, height).
    """

    height: Array
    colour: Array
    stone: Array
    course: Colour
    eye: Colour
    pitch: float
    yaw: float
    light: Light
    seed: int
    gates: tuple[tuple[float, float, float, float, float], ...] = ()


def smoothstep(low: float, high: float, x: Array) -> Array:
    t = np.clip((x - low) / (high - low), 0, 1)
    return t * t * (3 - 2 * t)


def mix(a: Array, b: Array | Colour, t: Array) -> Array:
    return a + (np.asarray(b, np.float32) - a) * t[..., None]


def fractal_noise(rng: np.random.Generator, shape: tuple[int, int], cells: float, octaves: int = 5) -> Array:
    """Smooth noise of about unit range; ``cells`` is the width in cells of its largest features."""
    total = np.zeros(shape, np.float32)
    weight = 1.0
    for _ in range(octaves):
        rows, columns = (max(2, round(n / cells) + 3) for n in shape)
        grid = rng.standard_normal((rows, columns)).astype(np.float32)
        total += weight * cv2.resize(grid, shape[::-1], interpolation=cv2.INTER_CUBIC)
        weight, cells = weight * 0.5, cells / 2
    return total / 1.3


def plan() -> tuple[Array, Array]:
    """x and z of every cell centre, [Z, X] each."""
    x = X_MIN + CELL * (np.arange(SHAPE[1], dtype=np.float32) + 0.5)
    z = Z_MIN + CELL * (np.arange(SHAPE[0], dtype=np.float32) + 0.5)
    return np.broadcast_to(x, SHAPE), np.broadcast_to(z[:, None], SHAPE)


def look_up(field: Array, columns: Array, rows: Array, border: int = cv2.BORDER_REPLICATE) -> Array:
    """Bilinear look-up at positions of one dimension, in cells."""
    parts = [np.empty((0, *field.shape[2:]), np.float32)]
    for i in range(0, len(columns), 16384):  # OpenCV's maps hold at most 32767 columns
        at = (np.asarray(a[None, i : i + 16384], np.float32) for a in (columns, rows))
        parts.append(cv2.remap(field, *at, cv2.INTER_LINEAR, None, border)[0])
    return np.concatenate(parts)


def sample(field: Array, x: Array, z: Array) -> Array:
    """Bilinear look-up of a [Z, X] or [Z, X, 3] field at world positions of one dimension."""
    return look_up(field, (x - X_MIN) / CELL - 0.5, (z - Z_MIN) / CELL - 0.5)


def plant(
    height: Array,
    colour: Array,
    where: list[tuple[float, float]],
    rng: np.random.Generator,
    tints: list[Colour],
    cone: bool,
) -> None:
    """Puts trees into a height field in place: round crowns, or tiered cones with snow on each tier."""
    ground = height.copy()
    for x, z in where:
        radius = rng.uniform(0.45, 1.0)
        rise = rng.uniform(2.4, 3.6) * radius if cone else rng.uniform(1.3, 1.9) * radius
        row, column, n = int((z - Z_MIN) / CELL), int((x - X_MIN) / CELL), int(radius / CELL) + 1
        if not (n <= row < SHAPE[0] - n and n <= column < SHAPE[1] - n):
            continue
        patch = np.s_[row - n : row + n + 1, column - n : column + n + 1]
        i, j = np.mgrid[-n : n + 1, -n : n + 1].astype(np.float32) * (CELL / radius)
        r = np.hypot(i, j) * (1 + 0.12 * np.sin(5 * np.arctan2(i, j) + 6 * rng.random()))
        tier = np.mod(4.5 * r, 1)
        crown = np.clip(1 - r, 0, 1) + 0.05 * tier if cone else np.sqrt(np.clip(1 - r * r, 0, 1))
        top = ground[patch] + crown * rise + (0.02 if cone else 0.05) * rng.standard_normal(r.shape)
        tint = np.array(tints[rng.integers(len(tints))], np.float32) * rng.uniform(0.8, 1.15)
        inside = (r < 1) & (top > height[patch])
        shade = ((0.75 + 0.4 * crown + 0.08 * rng.standard_normal(r.shape))[..., None] * tint).astype(np.float32)
        if cone:
            snow = (tier + 0.2 * rng.standard_normal(r.shape) > 0.45).astype(np.float32)
            shade = mix(shade, (0.78, 0.83, 0.92), 0.85 * snow)
        colour[patch][inside] = shade[inside]
        height[patch][inside] = top[inside]


def merlons(along: Array, pitch: float = 1.5) -> Array:
    """1 on the teeth of a battlement, 0 in its gaps."""
    return (np.mod(along, pitch) < 0.62 * pitch).astype(np.float32)


def autumn_wall() -> Scene:
    """A stone path on a wall that winds over autumn hills, with watchtowers."""
    rng = np.random.default_rng(4)
    x, z = plan()
    line = z[:, :1]
    centre = 5.5 * np.sin(line / 15 + 0.1) + 4 * np.sin(line / 31 + 0.4) - 5.5 * np.sin(0.1) - 4 * np.sin(0.4)
    crest = 2.6 * np.sin(line / 11 - 1.2) + 0.075 * line + 2.5 * np.sin(line / 27 + 2.6) + 1.3
    slope = np.gradient(centre[:, 0], CELL)[:, None]
    across = ((x - centre) / np.sqrt(1 + slope**2)).astype(np.float32)
    along = np.broadcast_to(np.cumsum(np.sqrt(1 + slope**2), axis=0) * CELL, SHAPE).astype(np.float32)

    hills = fractal_noise(rng, SHAPE, 520)
    away = smoothstep(1.5, 22, np.abs(across))
    ground = (crest - 0.7 - 5.5 * away + 4.0 * hills * (0.12 + away)).astype(np.float32)
    grain = fractal_noise(rng, SHAPE, 40)
    colour = mix(np.full((*SHAPE, 3), (0.30, 0.22, 0.07), np.float32), (0.16, 0.20, 0.05), smoothstep(-0.7, 0.9, grain))
    height = ground.copy()

    count = 5200
    tx, tz = rng.uniform(X_MIN, X_MAX, count), rng.uniform(Z_MIN, Z_MAX, count)
    rows = np.clip(((tz - Z_MIN) / CELL).astype(int), 0, SHAPE[0] - 1)
    free = np.abs((tx - centre[rows, 0]) / np.sqrt(1 + slope[rows, 0] ** 2)) > 3.3
    tints: list[Colour] = [
        (0.55, 0.14, 0.03),
        (0.62, 0.27, 0.04),
        (0.66, 0.42, 0.07),
        (0.40, 0.07, 0.03),
        (0.17, 0.22, 0.06),
    ]
    plant(height, colour, list(zip(tx[free], tz[free], strict=True)), rng, tints, cone=False)

    u = np.abs(across)
    walk = np.floor((crest + 1.0) / 0.14) * 0.14  # steps
    walk = np.where(np.abs(np.gradient(crest[:, 0], CELL))[:, None] > 0.12, walk, crest + 1.0).astype(np.float32)
    parapet = (u > 1.75) & (u < 2.1)
    top = walk + parapet * (0.55 + 0.4 * merlons(along))
    wall = u < 2.1
    stone = np.zeros(SHAPE, np.float32)
    slabs = 1 - 0.35 * np.maximum(
        np.mod(along, 0.8) < 0.06, np.mod(across + 0.35 * (np.floor(along / 0.8) % 2), 0.7) < 0.06
    )
    wear = (0.9 + 0.12 * fractal_noise(rng, SHAPE, 24, 4)) * slabs
    pavement = wear[..., None] * np.array((0.40, 0.36, 0.30), np.float32)
    height, colour, stone = (
        np.where(wall, top, height),
        np.where(wall[..., None], pavement, colour),
        np.where(wall, 1.0, stone),
    )

    gates = []
    for at in (27.0, 57.0, 90.0):
        row = int(np.searchsorted(along[:, 0], at))
        v = along - at
        side = np.maximum(u, np.abs(v))
        base = float(crest[row, 0]) + 1.0
        at_x, at_z = float(centre[row, 0]), float(line[row, 0])
        gates += [(at_x, base, at_z, 0.75, 2.0)]
        gates += [(at_x + shift, base + 3.0, at_z, 0.3, 0.9) for shift in (-1.5, 0.0, 1.5)]
        edge = (side > 2.55) & (side < 2.9)
        tower = side < 2.9
        teeth = merlons(np.where(u > np.abs(v), along, across) + 0.4, 1.3)
        roof = base + 4.6 + edge * (0.45 + 0.45 * teeth)
        height = np.where(tower, roof, height)
        colour = np.where(tower[..., None], wear[..., None] * np.array((0.42, 0.37, 0.30), np.float32), colour)
        stone = np.where(tower, 1.0, stone)

    eye = (0.0, float(np.interp(1.0, line[:, 0], crest[:, 0])) + 1.0 + 1.75, 1.0)
    light = Light(
        sun=(-0.62, 0.5, -0.35), sun_colour=(2.5, 2.1, 1.55), zenith=(0.10, 0.27, 0.66), horizon=(0.62, 0.74, 0.86),
        ambient=(0.30, 0.38, 0.52), fog=110, clouds=0.55, mountains=(0.20, 0.25, 0.36), mountain_height=0.20,
    )  # fmt: skip
    return Scene(
        height.astype(np.float32),
        colour.astype(np.float32),
        stone.astype(np.float32),
        (0.5, 0.42, 0.34),
        eye,
        -4.0,
        4.0,
        light,
        4,
        tuple(gates),
    )


def winter_wall() -> Scene:
    """A trail through snow along the foot of a wall of ice, with black towers on it and a pale sun."""
    rng = np.random.default_rng(3)
    x, z = plan()
    bays = fractal_noise(rng, SHAPE, 150, 4)
    foot = (-7.0 + 1.5 * np.sin(z / 13 + 0.6) + 0.0016 * z**2 + 1.1 * bays).astype(np.float32)
    drift = fractal_noise(rng, SHAPE, 240)
    trail = 1.6 * np.sin(z / 9 + 0.4) - 0.6 + 0.05 * z
    off_trail = smoothstep(0.7, 2.6, np.abs(x - trail))
    ground = (0.9 * drift * (0.15 + 0.85 * off_trail) + 0.35 * off_trail + 2.2 * smoothstep(8, 32, x)).astype(
        np.float32
    )
    ground += 0.03 * fractal_noise(rng, SHAPE, 18, 3) * (1.3 - off_trail)
    colour = mix(np.full((*SHAPE, 3), (0.62, 0.68, 0.78), np.float32), (0.84, 0.87, 0.92), off_trail)

    height = ground.copy()
    count = 900
    tx, tz = rng.uniform(3, X_MAX, count), rng.uniform(8, Z_MAX, count)
    free = tx - (-0.6 + 0.05 * tz) > 4.0 + 3.0 * rng.random(count)
    tints: list[Colour] = [(0.06, 0.10, 0.10), (0.05, 0.08, 0.10), (0.08, 0.12, 0.11)]
    plant(height, colour, list(zip(tx[free], tz[free], strict=True)), rng, tints, cone=True)

    inside = foot - x  # how far behind the foot of the ice
    ribs = fractal_noise(rng, SHAPE, 46, 4)
    rise = np.clip((inside + 0.45 * ribs) / 3.2, 0, 1)
    ledges = rise**0.8 + 0.035 * np.sin(rise * 22)
    ice = (13.0 + 1.2 * np.sin(z / 13) + 0.8 * drift) * ledges + 0.3 * ribs * rise
    cliff = rise > 0
    ice_colour = mix(
        np.full((*SHAPE, 3), (0.34, 0.55, 0.74), np.float32), (0.88, 0.91, 0.96), smoothstep(0.55, 1.0, rise)
    )
    ice_colour *= (1 + 0.12 * ribs)[..., None]
    height = np.where(cliff, np.maximum(ice, height), height)
    colour = np.where(cliff[..., None], ice_colour, colour)

    stone = np.zeros(SHAPE, np.float32)
    keeps = (
        (-8.0, 40.0, 1.8, 18.5),
        (-6.0, 62.0, 2.4, 20.0),
        (-3.0, 68.0, 1.4, 25.0),
        (2.0, 96.0, 3.0, 24.0),
        (12.0, 38.0, 1.4, 8.0),
    )
    for tower_x, tower_z, half, roof in keeps:
        side = np.maximum(np.abs(x - tower_x), np.abs(z - tower_z))
        edge = side > half - 0.35
        teeth = merlons(np.where(np.abs(x - tower_x) > np.abs(z - tower_z), z, x), 1.2)
        tower = side < half
        spire = roof + np.clip(half - 0.5 - side, 0, None) * 2.2
        height = np.where(tower, np.where(edge, roof + 0.5 * teeth, spire), height)
        colour = np.where(
            tower[..., None],
            np.where((edge | (side > half - 0.6))[..., None], (0.07, 0.075, 0.09), (0.55, 0.60, 0.68)),
            colour,
        )
        stone = np.where(tower & edge, 1.0, stone)

    eye = (-0.4, 2.0, 1.0)
    light = Light(
        sun=(0.55, 0.34, 0.62), sun_colour=(1.75, 1.5, 1.25), zenith=(0.30, 0.42, 0.60), horizon=(0.74, 0.78, 0.84),
        ambient=(0.42, 0.50, 0.64), fog=75, clouds=0.8, mountains=(0.50, 0.57, 0.68), mountain_height=0.30,
    )  # fmt: skip
    return Scene(
        height.astype(np.float32), colour.astype(np.float32), stone, (0.08, 0.085, 0.10), eye, 2.0, 3.0, light, 3
    )


def sky(directions: Array, light: Light, seed: int) -> Array:
    """Colour of the sky in unit directions [N, 3]: gradient, clouds, sun, and mountain ranges on the horizon."""
    rng = np.random.default_rng(seed + 100)
    up = directions[:, 1]
    colour = mix(
        np.broadcast_to(np.float32(light.horizon), directions.shape), light.zenith, smoothstep(-0.05, 0.65, up) ** 0.8
    )
    size = 1024
    noise = fractal_noise(rng, (size, size), 190, 7)
    plane = directions[:, [0, 2]] / np.maximum(up, 0.02)[:, None] * 130 + size / 2
    cover = look_up(noise, plane[:, 0], plane[:, 1], cv2.BORDER_REFLECT)
    cloud = smoothstep(0.15, 1.25, cover) * smoothstep(0.06, 0.3, up) * light.clouds
    colour = mix(colour, (0.95, 0.95, 0.96), cloud)
    toward = np.clip(directions @ unit(light.sun), 0, 1)
    colour += (0.35 * toward**12 + 0.5 * toward**90)[:, None] * np.float32(light.sun_colour) * 0.4
    azimuth = np.arctan2(directions[:, 0], directions[:, 2])
    for layer in range(3):
        ridge = fractal_noise(rng, (2, 2048), 260 / (1 + layer), 8)[0]
        crest = (
            light.mountain_height
            * (1 - 0.28 * layer)
            * (0.45 + 0.22 * np.interp(azimuth, np.linspace(-np.pi, np.pi, 2048), ridge))
        )
        tint = mix(np.float32(light.horizon)[None], light.mountains, np.float32([0.35 + 0.28 * layer]))
        lit = tint * (1 + 0.25 * smoothstep(0.0, 0.2, up - crest + 0.2))[:, None]
        colour = mix(colour, lit, smoothstep(-0.002, 0.002, (crest - up).astype(np.float32)))
    return colour.astype(np.float32)


def unit(v: Colour) -> Array:
    a = np.asarray(v, np.float32)
    return a / np.linalg.norm(a)


def march(height: Array, origin: Array, directions: Array, far: float) -> Array:
    """Distance along each ray to the height field; ``far`` where it meets nothing. origin [3] or [N, 3]."""
    origin = np.broadcast_to(origin, directions.shape)
    # Above the highest point within ``reach`` a ray may go that far without a look at what lies between.
    safe = []
    for reach in (0.25, 1.0, 4.0):
        n = 2 * round(reach / CELL) + 1
        along_z = cv2.dilate(height, np.ones((n, 1), np.uint8))
        safe.append((reach, cv2.dilate(along_z, np.ones((1, n), np.uint8))))
    hit = np.full(len(directions), far, np.float32)
    active = np.arange(len(directions))
    t = np.full(len(directions), 0.05, np.float32)
    previous = np.zeros_like(t)
    ceiling = float(height.max())
    while len(active):
        d = directions[active]
        p = origin[active] + d * t[active, None]
        below = p[:, 1] < sample(height, p[:, 0], p[:, 2])
        hit[active[below]] = t[active[below]]
        gone = (t[active] > far) | ((p[:, 1] > ceiling) & (d[:, 1] > 0))
        gone |= (p[:, 0] < X_MIN) | (p[:, 0] > X_MAX) | (p[:, 2] < Z_MIN) | (p[:, 2] > Z_MAX)
        keep = ~(below | gone)
        active, p, d = active[keep], p[keep], d[keep]
        previous[active] = t[active]
        step = 0.03 + 0.0008 * t[active]
        for reach, roof in safe:
            lowest = p[:, 1] + np.minimum(d[:, 1], 0) * reach
            step = np.where(lowest > sample(roof, p[:, 0], p[:, 2]), np.maximum(step, 0.95 * reach), step)
        t[active] += step.astype(np.float32)
    found = np.flatnonzero(hit < far)
    low, high = previous[found], hit[found]
    for _ in range(8):
        middle = (low + high) / 2
        p = origin[found] + directions[found] * middle[:, None]
        inside = p[:, 1] < sample(height, p[:, 0], p[:, 2])
        low, high = np.where(inside, low, middle), np.where(inside, middle, high)
    hit[found] = high
    return hit


def rays(scene: Scene) -> Array:
    """Unit directions [N, 3], row by row, for the supersampled picture."""
    n = SUPERSAMPLE
    px = ((np.arange(WIDTH * n) + 0.5) / n - CX) / FOCAL
    py = -((np.arange(HEIGHT * n) + 0.5) / n - CY) / FOCAL
    x, y = np.meshgrid(px, py)
    d = np.stack([x, y, np.ones_like(x)], -1).reshape(-1, 3)
    d /= np.linalg.norm(d, axis=1, keepdims=True)
    pitch, yaw = np.radians(scene.pitch), np.radians(scene.yaw)
    tilt = np.array([[1, 0, 0], [0, np.cos(pitch), np.sin(pitch)], [0, -np.sin(pitch), np.cos(pitch)]])
    turn = np.array([[np.cos(yaw), 0, np.sin(yaw)], [0, 1, 0], [-np.sin(yaw), 0, np.cos(yaw)]])
    return (d @ (turn @ tilt).T).astype(np.float32)


def shade(scene: Scene, directions: Array, distance: Array) -> Array:
    """Linear colour of the surface points that rays [N, 3] reach after distance [N]."""
    light, rng = scene.light, np.random.default_rng(scene.seed + 200)
    p = np.float32(scene.eye) + directions * distance[:, None]
    gradient_x, gradient_z = (np.gradient(scene.height, CELL, axis=a).astype(np.float32) for a in (1, 0))
    normal = np.stack(
        [-sample(gradient_x, p[:, 0], p[:, 2]), np.ones(len(p)), -sample(gradient_z, p[:, 0], p[:, 2])], -1
    )
    normal /= np.linalg.norm(normal, axis=1, keepdims=True)
    albedo = sample(scene.colour, p[:, 0], p[:, 2])

    # Upright stone faces: courses of blocks by height and by the position along the face.
    face = sample(scene.stone, p[:, 0], p[:, 2]) * smoothstep(0.8, 0.5, normal[:, 1].astype(np.float32))
    run = np.where(np.abs(normal[:, 0]) > np.abs(normal[:, 2]), p[:, 2], p[:, 0])
    row = np.floor(p[:, 1] / 0.32)
    block = np.floor(run / 0.7 + 0.5 * (row % 2))
    joint = np.maximum(np.mod(p[:, 1], 0.32) < 0.035, np.mod(run / 0.7 + 0.5 * (row % 2), 1) < 0.06)
    tone = 0.82 + 0.3 * rng.random(4096)[((row * 131 + block * 17).astype(int)) % 4096]
    albedo = mix(albedo, np.float32(scene.course) * (tone * (1 - 0.45 * joint))[:, None].astype(np.float32), face)

    for gate_x, bottom, gate_z, half, rise in scene.gates:
        arch = np.abs(p[:, 0] - gate_x - 0.02) < half * np.sqrt(np.clip(1 - ((p[:, 1] - bottom) / rise) ** 4, 0, 1))
        here = arch & (p[:, 1] > bottom - 0.3) & (np.abs(p[:, 2] - gate_z + 2.9) < 1.2) & (normal[:, 2] < -0.6)
        albedo[here] = (0.025, 0.022, 0.02)

    sun = unit(light.sun)
    diffuse = np.clip(normal @ sun, 0, None)
    lifted = p + normal.astype(np.float32) * 0.06
    shadow = np.zeros(len(p), np.float32)
    toward = np.flatnonzero(diffuse > 0)
    shadow[toward] = march(scene.height, lifted[toward], np.broadcast_to(sun, (len(toward), 3)), 60.0) >= 60.0
    wide = cv2.GaussianBlur(scene.height, (0, 0), 0.7 / CELL)
    open_sky = np.clip(1 - 0.45 * (sample(wide, p[:, 0], p[:, 2]) - p[:, 1]), 0.35, 1.0)
    sky_light = (0.6 + 0.4 * normal[:, 1]) * open_sky
    lit = albedo * (
        (diffuse * shadow)[:, None] * np.float32(light.sun_colour) + sky_light[:, None] * np.float32(light.ambient)
    )
    haze = np.float32(light.horizon) + 0.25 * (np.clip(directions @ sun, 0, 1) ** 8)[:, None] * np.float32(
        light.sun_colour
    )
    return mix(
        lit.astype(np.float32),
        haze.astype(np.float32),
        (1 - np.exp(-((distance / light.fog) ** 1.5))).astype(np.float32),
    )


def render(scene: Scene) -> NDArray[np.uint8]:
    """The picture, [HEIGHT, WIDTH, 3] BGR uint8."""
    directions = rays(scene)
    distance = march(scene.height, np.float32(scene.eye), directions, 150.0)
    colour = sky(directions, scene.light, scene.seed)
    surface = distance < 150.0
    colour[surface] = shade(scene, directions[surface], distance[surface])
    image = colour.reshape(HEIGHT * SUPERSAMPLE, WIDTH * SUPERSAMPLE, 3)
    image = cv2.resize(np.clip(image, 0, 4), (WIDTH, HEIGHT), interpolation=cv2.INTER_AREA)
    image = image * (1 + image / 6) / (1 + image)  # keeps highlights from burning out
    encoded = np.clip(1.45 * image, 0, 1) ** (1 / 2.2)
    return np.round(encoded[..., ::-1] * 255).astype(np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description="Renders the start images of the examples.")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).resolve().parent, help="folder that gets 03/ and 04/"
    )
    out = parser.parse_args().out
    for name, scene in (("03", winter_wall()), ("04", autumn_wall())):
        path = out / name / "image.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), render(scene), [cv2.IMWRITE_JPEG_QUALITY, 88])
        print(path, f"{path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
