"""The scene on a CPU: numpy on whole pictures, things only inside the part of the picture that they can touch.

Four rays per pixel. ``render_triton`` is the same, line for line; ``render_check`` compares the two on a GPU.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .scene import BOX_BEGIN, CYLINDER_BEGIN, FOG_BEGIN, FOG_END, NEAR, PRIMITIVES, Scenes, View, shadow_radius
from .styles import AMBIENT, CAP, CLOUD, GROUND_A, GROUND_B, GROUND_C, LIGHT, MOUNTAIN, ROWS, SKY_LOW, SKY_TOP, SUN

Array = NDArray[Any]
FAR = np.float32(1e9)
CELL_WAVES = 1.0  # periods of the checker per unit: cells of half a unit
MEADOW = np.float32(2 * np.pi / 12)


def render_view(scenes: Scenes, seen: View, height: int, width: int) -> Tensor:
    """uint8 [F, 3, height, width]."""
    out = np.empty((len(seen.frame), 3, height, width), np.uint8)
    frame, rel, box = seen.frame.numpy(), seen.rel.numpy(), seen.box.numpy()
    half, turn, colour = scenes.half.numpy(), scenes.turn.numpy(), scenes.colour.numpy()
    shadow, palette = shadow_radius(scenes.reach).numpy(), seen.palette.numpy()
    for f, b in enumerate(seen.scene.tolist()):
        out[f] = _frame(frame[f], rel[f], box[f], half[b], turn[b], colour[b], shadow[b], palette[f], height, width)
    return torch.from_numpy(out)


@lru_cache(maxsize=4)
def _rays(inv_fx: float, inv_fy: float, cx: float, cy: float, height: int, width: int) -> Array:
    """Unit directions [3, 2 * height * 2 * width] in the camera's axes."""
    x = ((np.arange(2 * width, dtype=np.float32) + 0.5) * 0.5 - cx) * inv_fx
    y = ((np.arange(2 * height, dtype=np.float32) + 0.5) * 0.5 - cy) * inv_fy
    rays = np.stack([np.broadcast_to(x, (len(y), len(x))), np.broadcast_to(y[:, None], (len(y), len(x)))])
    length = np.sqrt(1 + rays[0] ** 2 + rays[1] ** 2)
    return np.stack([rays[0] / length, rays[1] / length, 1 / length]).reshape(3, -1).astype(np.float32)


def _smooth(low: float, high: float, x: Array) -> Array:
    t = np.clip((x - np.float32(low)) * np.float32(1 / (high - low)), 0, 1)
    return t * t * (3 - 2 * t)


def _sky(d: Array, q: Array, p: Array) -> Array:
    """Colours [3, n] of directions [3, n] that meet nothing. q: the frame's numbers. p: its palette."""
    up = -d[1]
    h = np.clip(up * np.float32(1 / 0.6), 0, 1)
    g = h * (2 - h)
    colour = p[SKY_LOW][:, None] + (p[SKY_TOP] - p[SKY_LOW])[:, None] * g
    u = 1 / (np.maximum(up, 0) + np.float32(0.18))
    x, z = d[0] * u, d[2] * u
    c = np.sin(2.1 * x + q[23] + 1.3 * np.sin(1.7 * z + q[24]))
    c = c * np.sin(1.9 * z + q[25] + 1.1 * np.sin(1.3 * x + q[26]))
    c = np.float32(0.8) * _smooth(0.1, 0.6, c) * _smooth(0.04, 0.2, up)
    colour += (p[CLOUD][:, None] - colour) * c
    s = np.maximum(d[0] * q[17] + d[1] * q[18] + d[2] * q[19], 0)
    s4 = s * s * s * s
    glow = s4 * s4
    glow = np.float32(0.4) * glow * glow * (up > 0)
    glow = np.maximum(glow, _smooth(0.991, 0.9945, s))
    colour += (p[SUN][:, None] - colour) * glow
    flat = np.sqrt(d[0] * d[0] + d[2] * d[2]) + np.float32(1e-6)
    slope, ux, uz = up / flat, d[0] / flat, d[2] / flat
    ridge = (
        np.float32(0.13)
        + 0.06 * np.sin(4 * ux + 2 * uz + q[21])
        + 0.035 * np.sin(9 * uz - 5 * ux + q[22])
        + 0.02 * np.sin(17 * ux + 11 * uz + q[28])
    )
    edge = np.clip((ridge - slope) * np.float32(60), 0, 1)
    haze = np.float32(0.25) + np.float32(0.75) * np.clip(slope * np.float32(8), 0, 1)
    hill = p[SKY_LOW][:, None] + (p[MOUNTAIN] - p[SKY_LOW])[:, None] * haze
    colour += (hill - colour) * edge
    return np.where(up < 0, p[SKY_LOW][:, None], colour)


def _wave(x: Array) -> Array:
    """A triangle wave of period 1 within -1..1."""
    x = x - np.floor(x)
    return 4 * np.abs(x - np.float32(0.5)) - 1


def _ground(x: Array, z: Array, blur: Array, q: Array, p: Array) -> Array:
    """Unlit colours [3, n] of the ground at x, z; blur: the size of a pixel there."""
    soft = 1 / np.maximum(np.float32(4 * CELL_WAVES) * blur, np.float32(0.12))
    c = np.clip(_wave(x * np.float32(CELL_WAVES)) * soft, -1, 1) * np.clip(
        _wave(z * np.float32(CELL_WAVES)) * soft, -1, 1
    )
    colour = p[GROUND_A][:, None] + (p[GROUND_B] - p[GROUND_A])[:, None] * (np.float32(0.5) + np.float32(0.5) * c)
    m = np.sin(2 * MEADOW * x + q[29]) * np.sin(MEADOW * z + q[30]) + np.float32(0.5) * np.sin(3 * MEADOW * z + q[31])
    m = np.float32(0.75) * _smooth(0.1, 0.7, m)
    return colour + (p[GROUND_C][:, None] - colour) * m


def _blend(colours: Array, where: Array, base: Array, distance: Array) -> None:
    """Lays lit colours over the sky, thinned by the fog."""
    behind = colours[:, where]
    colours[:, where] = behind + (np.minimum(base, 1) - behind) * (1 - _smooth(FOG_BEGIN, FOG_END, distance[where]))


def _frame(
    q: Array,
    rel: Array,
    box: Array,
    half: Array,
    turn: Array,
    colour: Array,
    shadow_size: Array,
    p: Array,
    height: int,
    width: int,
) -> Array:
    rays = _rays(float(q[12]), float(q[13]), float(q[14]), float(q[15]), height, width)
    d = q[:9].reshape(3, 3) @ rays
    shape = (2 * height, 2 * width)
    dx, dy, dz = (row.reshape(shape) for row in d)
    eye = q[9]
    down = dy > np.float32(1e-4)
    tg = np.where(down, eye / np.where(down, dy, 1), FAR).astype(np.float32)
    tg = np.where(tg > 0, tg, FAR)
    gx, gz = tg * dx, tg * dz

    best = tg.copy()
    normal = np.zeros((3, *shape), np.float32)
    row = np.full(shape, -1, np.int64)
    level = np.zeros(shape, np.float32)
    shade = np.zeros(shape, np.float32)

    for n in range(PRIMITIVES):
        x0, x1, y0, y1 = box[n]
        if x0 >= x1 or y0 >= y1:
            continue
        part = np.s_[max(int(2 * y0) - 1, 0) : int(2 * y1) + 2, max(int(2 * x0) - 1, 0) : int(2 * x1) + 2]
        ex, ey, ez, t0 = dx[part], dy[part], dz[part], best[part]
        rx, ry, rz = rel[n]
        hx, hy, hz = half[n]

        sx, sz = gx[part] - rx, gz[part] - rz
        dark = 1 - (sx * sx + sz * sz) * (1 / (shadow_size[n] * shadow_size[n]))
        np.maximum(shade[part], dark, out=shade[part])

        if n < BOX_BEGIN:
            b = ex * rx + ey * ry + ez * rz
            disc = b * b - (rx * rx + ry * ry + rz * rz - hx * hx)
            t = b - np.sqrt(np.maximum(disc, 0))
            hit = (disc > 0) & (t > NEAR) & (t < t0)
            if not hit.any():
                continue
            inv = 1 / hx
            nx, ny, nz = (t * ex - rx) * inv, (t * ey - ry) * inv, (t * ez - rz) * inv
        elif n < CYLINDER_BEGIN:
            c, s = turn[n]
            ox, oz = rx * c + rz * s, rz * c - rx * s
            lx, lz = ex * c + ez * s, ez * c - ex * s
            ix, iy, iz = (1 / np.where(np.abs(v) < 1e-6, np.float32(1e-6), v) for v in (lx, ey, lz))
            ax, ay, az = np.abs(ix) * hx, np.abs(iy) * hy, np.abs(iz) * hz
            mx, my, mz = ox * ix - ax, ry * iy - ay, oz * iz - az
            t = np.maximum(np.maximum(mx, my), mz)
            leave = np.minimum(np.minimum(ox * ix + ax, ry * iy + ay), oz * iz + az)
            hit = (t < leave) & (t > NEAR) & (t < t0)
            if not hit.any():
                continue
            onx, ony = (mx >= my) & (mx >= mz), my >= mz
            kx = np.where(onx, -np.sign(lx), 0)
            kz = np.where(~onx & ~ony, -np.sign(lz), 0)
            nx, ny, nz = kx * c - kz * s, np.where(~onx & ony, -np.sign(ey), 0), kx * s + kz * c
        else:
            a = ex * ex + ez * ez + np.float32(1e-9)
            b = ex * rx + ez * rz
            disc = b * b - a * (rx * rx + rz * rz - hx * hx)
            t = (b - np.sqrt(np.maximum(disc, 0))) / a
            side = (disc > 0) & (t > NEAR) & (np.abs(t * ey - ry) < hy)
            top = (ry - hy) / np.maximum(ey, np.float32(1e-6))
            cx, cz = top * ex - rx, top * ez - rz
            cap = (ey > 1e-6) & (top > NEAR) & (cx * cx + cz * cz < hx * hx) & (~side | (top < t))
            t = np.where(cap, top, t)
            hit = (side | cap) & (t < t0)
            if not hit.any():
                continue
            inv = 1 / hx
            nx = np.where(cap, 0, (t * ex - rx) * inv)
            ny = np.where(cap, np.float32(-1), 0)
            nz = np.where(cap, 0, (t * ez - rz) * inv)
        np.copyto(best[part], t, where=hit)
        np.copyto(normal[0][part], nx, where=hit)
        np.copyto(normal[1][part], ny, where=hit)
        np.copyto(normal[2][part], nz, where=hit)
        np.copyto(level[part], (t * ey - ry) * (1 / hy), where=hit)
        np.copyto(row[part], colour[n], where=hit)

    distance = (best * np.sqrt(dx * dx + dz * dz)).ravel()
    row, dy, shade, normal, level = row.ravel(), dy.ravel(), shade.ravel(), normal.reshape(3, -1), level.ravel()
    colours = np.empty((3, len(row)), np.float32)
    colours[:] = p[SKY_LOW][:, None]
    open_sky = np.flatnonzero((distance > FOG_BEGIN) & (dy < 0))
    colours[:, open_sky] = _sky(d[:, open_sky], q, p)
    solid = distance < FOG_END
    floor, thing = np.flatnonzero(solid & (row < 0)), np.flatnonzero(solid & (row >= 0))

    ambient, light = p[AMBIENT] * np.float32(0.55), p[LIGHT] * np.float32(0.72)
    if len(floor):
        x, z, t = gx.ravel()[floor] + q[10], gz.ravel()[floor] + q[11], tg.ravel()[floor]
        lit = (ambient + light * np.float32(0.8))[:, None] * (1 - np.float32(0.5) * shade[floor])
        base = _ground(x, z, q[16] * t / np.sqrt(dy[floor]), q, p) * lit
        _blend(colours, floor, base, distance)
    if len(thing):
        n, y = normal[:, thing], level[thing]
        base = p[row[thing]].T
        white = p[ROWS][:, None] * _smooth(0.3, 0.8, -n[1])
        base = base + (p[CAP][:, None] - base) * white
        # A lighter head and a darker foot tell up from down on every thing.
        head, foot = np.clip(-8 * y - np.float32(4.8), 0, 1), np.clip(8 * y - np.float32(4.4), 0, 1)
        tone = 1 + np.float32(0.12) * head - np.float32(0.26) * foot
        k = np.float32(0.5) + np.float32(0.5) * (n[0] * q[17] + n[1] * q[18] + n[2] * q[19])
        base = base * tone * (ambient[:, None] + light[:, None] * k)
        _blend(colours, thing, base, distance)
    picture = colours.reshape(3, height, 2, width, 2)
    picture = (picture[:, :, 0] + picture[:, :, 1]).sum(axis=-1) * np.float32(0.25)
    return (np.clip(picture, 0, 1) * 255 + np.float32(0.5)).astype(np.uint8)
