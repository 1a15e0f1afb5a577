"""The scene on a GPU: one Triton program per tile of a picture, four rays per pixel in its lanes.

A program skips every thing whose part of the picture does not touch its tile. The arithmetic is that of
``render_numpy``, in the same order; ``render_check`` compares the two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import scene as world
from . import styles as look
from .scene import Scenes, View, shadow_radius

TILE_H, TILE_W, WARPS = 8, 16, 4


@triton.jit
def _smooth(low, high, x):
    t = tl.minimum(tl.maximum((x - low) * (1.0 / (high - low)), 0.0), 1.0)
    return t * t * (3.0 - 2.0 * t)


@triton.jit
def _wave(x):
    x = x - tl.floor(x)
    return 4.0 * tl.abs(x - 0.5) - 1.0


@triton.jit
def _clip1(x):
    return tl.minimum(tl.maximum(x, 0.0), 1.0)


@triton.jit
def _sign(x):
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, 0.0))


@triton.jit
def _kernel(
    out, frames, rels, boxes, scene_of, halves, turns, colours, shadows, palettes_,
    H: tl.constexpr, W: tl.constexpr, TH: tl.constexpr, TW: tl.constexpr,
    NS: tl.constexpr, NB: tl.constexpr, N: tl.constexpr, FRAME: tl.constexpr, PALETTE: tl.constexpr,
    NEAR: tl.constexpr, FOG_A: tl.constexpr, FOG_B: tl.constexpr, MEADOW: tl.constexpr,
    SKY_TOP: tl.constexpr, SKY_LOW: tl.constexpr, CLOUD: tl.constexpr, SUN: tl.constexpr, MOUNTAIN: tl.constexpr,
    GROUND_A: tl.constexpr, GROUND_B: tl.constexpr, GROUND_C: tl.constexpr, LIGHT: tl.constexpr,
    AMBIENT: tl.constexpr, CAP: tl.constexpr, AMOUNT: tl.constexpr,
):  # fmt: skip
    tiles_w: tl.constexpr = (W + TW - 1) // TW
    f = tl.program_id(1).to(tl.int64)
    y_tile = (tl.program_id(0) // tiles_w) * TH
    x_tile = (tl.program_id(0) % tiles_w) * TW
    lane = tl.arange(0, TH * TW * 4)
    pixel = lane // 4
    px = x_tile + pixel % TW
    py = y_tile + pixel // TW
    q = frames + f * FRAME
    p = palettes_ + f * PALETTE
    b = tl.load(scene_of + f)

    # Rays
    u = (px.to(tl.float32) + 0.25 + 0.5 * (lane % 2).to(tl.float32) - tl.load(q + 14)) * tl.load(q + 12)
    v = (py.to(tl.float32) + 0.25 + 0.5 * ((lane // 2) % 2).to(tl.float32) - tl.load(q + 15)) * tl.load(q + 13)
    inv = 1.0 / tl.sqrt(1.0 + u * u + v * v)
    u, v, w = u * inv, v * inv, inv
    dx = tl.load(q + 0) * u + tl.load(q + 1) * v + tl.load(q + 2) * w
    dy = tl.load(q + 3) * u + tl.load(q + 4) * v + tl.load(q + 5) * w
    dz = tl.load(q + 6) * u + tl.load(q + 7) * v + tl.load(q + 8) * w
    down = dy > 1e-4
    tg = tl.where(down, tl.load(q + 9) / tl.where(down, dy, 1.0), 1e9)
    tg = tl.where(tg > 0.0, tg, 1e9)
    gx, gz = tg * dx, tg * dz

    best = tg
    n0, n1, n2 = tg * 0.0, tg * 0.0, tg * 0.0
    level, shade = tg * 0.0, tg * 0.0
    row = lane * 0 - 1

    for n in range(N):
        box = boxes + (f * N + n) * 4
        if (
            (tl.load(box) < x_tile + TW)
            & (tl.load(box + 1) > x_tile)
            & (tl.load(box + 2) < y_tile + TH)
            & (tl.load(box + 3) > y_tile)
        ):
            rel = rels + (f * N + n) * 3
            rx, ry, rz = tl.load(rel), tl.load(rel + 1), tl.load(rel + 2)
            half = halves + (b * N + n) * 3
            hx, hy, hz = tl.load(half), tl.load(half + 1), tl.load(half + 2)
            size = tl.load(shadows + b * N + n)
            sx, sz = gx - rx, gz - rz
            shade = tl.maximum(shade, 1.0 - (sx * sx + sz * sz) * (1.0 / (size * size)))
            if n < NS:
                along = dx * rx + dy * ry + dz * rz
                disc = along * along - (rx * rx + ry * ry + rz * rz - hx * hx)
                t = along - tl.sqrt(tl.maximum(disc, 0.0))
                hit = (disc > 0.0) & (t > NEAR) & (t < best)
                k = 1.0 / hx
                m0, m1, m2 = (t * dx - rx) * k, (t * dy - ry) * k, (t * dz - rz) * k
            elif n < NS + NB:
                c, s = tl.load(turns + (b * N + n) * 2), tl.load(turns + (b * N + n) * 2 + 1)
                ox, oz = rx * c + rz * s, rz * c - rx * s
                lx, lz = dx * c + dz * s, dz * c - dx * s
                ix = 1.0 / tl.where(tl.abs(lx) < 1e-6, 1e-6, lx)
                iy = 1.0 / tl.where(tl.abs(dy) < 1e-6, 1e-6, dy)
                iz = 1.0 / tl.where(tl.abs(lz) < 1e-6, 1e-6, lz)
                ax, ay, az = tl.abs(ix) * hx, tl.abs(iy) * hy, tl.abs(iz) * hz
                mx, my, mz = ox * ix - ax, ry * iy - ay, oz * iz - az
                t = tl.maximum(tl.maximum(mx, my), mz)
                leave = tl.minimum(tl.minimum(ox * ix + ax, ry * iy + ay), oz * iz + az)
                hit = (t < leave) & (t > NEAR) & (t < best)
                onx = (mx >= my) & (mx >= mz)
                ony = (my >= mz) & (~onx)
                kx = tl.where(onx, -_sign(lx), 0.0)
                kz = tl.where(onx | ony, 0.0, -_sign(lz))
                m0, m1, m2 = kx * c - kz * s, tl.where(ony, -_sign(dy), 0.0), kx * s + kz * c
            else:
                a = dx * dx + dz * dz + 1e-9
                along = dx * rx + dz * rz
                disc = along * along - a * (rx * rx + rz * rz - hx * hx)
                t = (along - tl.sqrt(tl.maximum(disc, 0.0))) / a
                side = (disc > 0.0) & (t > NEAR) & (tl.abs(t * dy - ry) < hy)
                top = (ry - hy) / tl.maximum(dy, 1e-6)
                cx, cz = top * dx - rx, top * dz - rz
                lid = (dy > 1e-6) & (top > NEAR) & (cx * cx + cz * cz < hx * hx) & ((~side) | (top < t))
                t = tl.where(lid, top, t)
                hit = (side | lid) & (t < best)
                k = 1.0 / hx
                m0 = tl.where(lid, 0.0, (t * dx - rx) * k)
                m1 = tl.where(lid, -1.0, 0.0)
                m2 = tl.where(lid, 0.0, (t * dz - rz) * k)
            best = tl.where(hit, t, best)
            n0, n1, n2 = tl.where(hit, m0, n0), tl.where(hit, m1, n1), tl.where(hit, m2, n2)
            level = tl.where(hit, (t * dy - ry) * (1.0 / hy), level)
            row = tl.where(hit, tl.load(colours + b * N + n), row)

    # What lies behind: sky, clouds, sun, hills
    up = -dy
    h = _clip1(up * (1.0 / 0.6))
    g = h * (2.0 - h)
    e = 1.0 / (tl.maximum(up, 0.0) + 0.18)
    x, z = dx * e, dz * e
    cloud = tl.sin(2.1 * x + tl.load(q + 23) + 1.3 * tl.sin(1.7 * z + tl.load(q + 24)))
    cloud = cloud * tl.sin(1.9 * z + tl.load(q + 25) + 1.1 * tl.sin(1.3 * x + tl.load(q + 26)))
    cloud = 0.8 * _smooth(0.1, 0.6, cloud) * _smooth(0.04, 0.2, up)
    sun_x, sun_y, sun_z = tl.load(q + 17), tl.load(q + 18), tl.load(q + 19)
    s1 = tl.maximum(dx * sun_x + dy * sun_y + dz * sun_z, 0.0)
    s4 = s1 * s1 * s1 * s1
    glow = s4 * s4
    glow = tl.where(up > 0.0, 0.4 * glow * glow, 0.0)
    glow = tl.maximum(glow, _smooth(0.991, 0.9945, s1))
    flat = tl.sqrt(dx * dx + dz * dz) + 1e-6
    slope, ux, uz = up / flat, dx / flat, dz / flat
    ridge = 0.13 + 0.06 * tl.sin(4.0 * ux + 2.0 * uz + tl.load(q + 21))
    ridge = ridge + 0.035 * tl.sin(9.0 * uz - 5.0 * ux + tl.load(q + 22))
    ridge = ridge + 0.02 * tl.sin(17.0 * ux + 11.0 * uz + tl.load(q + 28))
    edge = _clip1((ridge - slope) * 60.0)
    haze = 0.25 + 0.75 * _clip1(slope * 8.0)

    # What is met: the ground, or a thing
    distance = best * tl.sqrt(dx * dx + dz * dz)
    clear = tl.where(distance < FOG_B, 1.0 - _smooth(FOG_A, FOG_B, distance), 0.0)
    x, z = gx + tl.load(q + 10), gz + tl.load(q + 11)
    blur = tl.load(q + 16) * tg / tl.sqrt(tl.maximum(dy, 1e-4))
    soft = 1.0 / tl.maximum(4.0 * blur, 0.12)
    check = tl.minimum(tl.maximum(_wave(x) * soft, -1.0), 1.0) * tl.minimum(tl.maximum(_wave(z) * soft, -1.0), 1.0)
    check = 0.5 + 0.5 * check
    # Far away the arguments are large and nothing is seen.
    x, z = tl.where(down & (distance < FOG_B), x, 0.0), tl.where(down & (distance < FOG_B), z, 0.0)
    meadow = tl.sin(2.0 * MEADOW * x + tl.load(q + 29)) * tl.sin(MEADOW * z + tl.load(q + 30))
    meadow = 0.75 * _smooth(0.1, 0.7, meadow + 0.5 * tl.sin(3.0 * MEADOW * z + tl.load(q + 31)))
    darkness = 1.0 - 0.5 * shade
    thing = row >= 0
    white = _smooth(0.3, 0.8, -n1)
    tone = 1.0 + 0.12 * _clip1(-8.0 * level - 4.8) - 0.26 * _clip1(8.0 * level - 4.4)
    facing = 0.5 + 0.5 * (n0 * sun_x + n1 * sun_y + n2 * sun_z)

    for channel in tl.static_range(3):
        pc = p + channel
        low = tl.load(pc + SKY_LOW * 3)
        colour = low + (tl.load(pc + SKY_TOP * 3) - low) * g
        colour = colour + (tl.load(pc + CLOUD * 3) - colour) * cloud
        colour = colour + (tl.load(pc + SUN * 3) - colour) * glow
        colour = colour + (low + (tl.load(pc + MOUNTAIN * 3) - low) * haze - colour) * edge
        colour = tl.where(up > 0.0, colour, low)
        ambient, light = tl.load(pc + AMBIENT * 3) * 0.55, tl.load(pc + LIGHT * 3) * 0.72
        ga = tl.load(pc + GROUND_A * 3)
        floor = ga + (tl.load(pc + GROUND_B * 3) - ga) * check
        floor = floor + (tl.load(pc + GROUND_C * 3) - floor) * meadow
        floor = floor * ((ambient + light * 0.8) * darkness)
        base = tl.load(pc + tl.maximum(row, 0) * 3)
        base = base + (tl.load(pc + CAP * 3) - base) * (white * tl.load(pc + AMOUNT * 3))
        base = base * tone * (ambient + light * facing)
        base = tl.minimum(tl.where(thing, base, floor), 1.0)
        colour = colour + (base - colour) * clear
        mean = tl.sum(tl.reshape(colour, (TH * TW, 4)), axis=1) * 0.25
        cell = tl.arange(0, TH * TW)
        ox_, oy_ = x_tile + cell % TW, y_tile + cell // TW
        value = (_clip1(mean) * 255.0 + 0.5).to(tl.uint8)
        tl.store(out + ((f * 3 + channel) * H + oy_) * W + ox_, value, mask=(ox_ < W) & (oy_ < H))


def render_view(scenes: Scenes, seen: View, height: int, width: int) -> Tensor:
    """uint8 [F, 3, height, width] on the scenes' device."""
    frames = len(seen.frame)
    out = torch.empty((frames, 3, height, width), dtype=torch.uint8, device=seen.frame.device)
    tiles = triton.cdiv(height, TILE_H) * triton.cdiv(width, TILE_W)
    # The second axis of a grid ends at 65535.
    for begin in range(0, frames, 32768):
        part = slice(begin, min(begin + 32768, frames))
        arguments = _arguments(scenes, seen, part)
        _kernel[(tiles, part.stop - begin)](
            out[part], *arguments, H=height, W=width, TH=TILE_H, TW=TILE_W, **constants(), num_warps=WARPS
        )
    return out


def _arguments(scenes: Scenes, seen: View, part: slice) -> list[Tensor]:
    per_frame = [seen.frame[part], seen.rel[part], seen.box[part], seen.scene[part].to(torch.int32)]
    per_scene = [scenes.half, scenes.turn, scenes.colour.to(torch.int32), shadow_radius(scenes.reach)]
    return [tensor.contiguous() for tensor in (*per_frame, *per_scene, seen.palette[part])]


def constants() -> dict[str, float | int]:
    """The kernel's compile-time numbers that do not depend on the picture's size."""
    names = ("SKY_TOP", "SKY_LOW", "CLOUD", "SUN", "MOUNTAIN", "GROUND_A", "GROUND_B", "GROUND_C")
    names += ("LIGHT", "AMBIENT", "CAP")
    return {
        "NS": world.SPHERE_COUNT,
        "NB": world.BOX_COUNT,
        "N": world.PRIMITIVES,
        "FRAME": world.FRAME,
        "PALETTE": (look.ROWS + 1) * 3,
        "NEAR": world.NEAR,
        "FOG_A": world.FOG_BEGIN,
        "FOG_B": world.FOG_END,
        "MEADOW": 2 * torch.pi / world.PERIOD,
        "AMOUNT": look.ROWS,
        **{name: getattr(look, name) for name in names},
    }
