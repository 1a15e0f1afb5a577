"""A world that is small but made of the real classes, and recorded walks through it that many tests share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation
from torch import Tensor, nn

from lingbot_core.camera.controls import Controls
from lingbot_core.engine.condition import ImageCondition
from lingbot_core.engine.image import PreparedImage
from lingbot_core.engine.session import Chunk, WorldSession
from lingbot_core.engine.world import World
from lingbot_core.models.dit import CausalWanDiT, DiTConfig
from lingbot_core.models.kv_cache import KVCache
from lingbot_core.models.vae import VAEConfig, WanVAE
from lingbot_core.presets import Preset, TableSteps, UniPCSteps

HEIGHT, WIDTH = 16, 32
DIT = DiTConfig(dim=64, ffn_dim=96, num_layers=3, num_heads=2, freq_dim=32, text_dim=20, text_len=12)
# Two steps keep the tests quick; what happens between steps happens once.
TWO_STEPS = TableSteps((0, 500))
RECIPES = {
    preset.name: preset
    for preset in (
        Preset("whole-past", chunk=3, selection=TWO_STEPS, shift=5.0),
        Preset("window", chunk=3, selection=TWO_STEPS, shift=5.0, window=9, sink=3),
        # 18 is no multiple of 4, and the sink is one and a half chunks: evictions of 2, then of 4 frames.
        Preset("partial-eviction", chunk=4, selection=TWO_STEPS, shift=5.0, window=18, sink=6),
        Preset("reuse-last-step", chunk=3, selection=TWO_STEPS, shift=5.0, window=9, sink=3, reuse_last_step_kv=True),
        Preset("guided", chunk=3, selection=UniPCSteps(3), shift=5.0, window=9, sink=3, guidance_scale=5.0),
    )
}


def random_weights(module: nn.Module, seed: int) -> None:
    """Weights that let every input be felt in every output, with activations of about unit size."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        value = torch.randn(parameter.shape, generator=generator)
        if name.endswith(("gamma", "norm_q.weight", "norm_k.weight", "norm3.weight")):
            value = 1 + 0.1 * value
        elif "modulation" in name:
            value = 0.5 * value
        elif parameter.ndim < 2:
            value = 0.1 * value
        else:
            value = value / math.sqrt(math.prod(parameter.shape[1:]))
        parameter.data.copy_(value)


def make_world(control: str = "cam", seed: int = 1) -> World:
    dit = CausalWanDiT(DiTConfig(**{**DIT.__dict__, "control": control})).eval().requires_grad_(False)
    vae = WanVAE(VAEConfig(dim=4, num_res_blocks=1)).eval().requires_grad_(False)
    random_weights(dit, seed)
    random_weights(vae, seed + 1)
    return World(
        dit=dit,
        vae=vae,
        text=None,
        preset=RECIPES["whole-past"],
        device=torch.device("cpu"),
        cache_dtype=torch.float32,
        name=f"small {control}",
        area=HEIGHT * WIDTH,
    )


def prompt_states(index: int) -> Tensor:
    """Text states of a made-up prompt; the number of tokens differs from prompt to prompt."""
    generator = torch.Generator().manual_seed(100 + index)
    return torch.randn(4 + index, DIT.text_dim, generator=generator)


def walk_controls(index: int, latents: int, prompt: str | None = None) -> Controls:
    """Controls of chunk ``index`` of a path that turns and moves differently in every latent frame."""
    steps = np.arange(latents) + index * latents + 1.0
    relative = np.tile(np.eye(4), (latents, 1, 1))
    angles = 0.1 * np.sin(steps[:, None] * [0.7, 1.1, 1.9])
    relative[:, :3, :3] = Rotation.from_rotvec(angles).as_matrix()
    relative[:, :3, 3] = np.cos(steps[:, None] * [0.3, 1.7, 0.9])
    after = np.eye(4)
    after[0, 3] = index + 1.0
    return Controls(relative, after, prompt)


@dataclass(eq=False)
class SmallWorld:
    """The world, its start image encoded once, and how tests begin and drive sessions of it."""

    world: World
    condition: ImageCondition

    def start(self, preset: Preset | str = "window", **options: object) -> WorldSession:
        recipe = RECIPES[preset] if isinstance(preset, str) else preset
        options = {"seed": 7, **options}
        if recipe.guided:
            options = {"negative_prompt": "ugly", "negative_states": prompt_states(5), **options}
        image, world = options.pop("image", self.condition), options.pop("world", self.world)
        states = options.pop("prompt_states", None)
        if states is None:
            states = prompt_states(0)
        return WorldSession.start(world, image, "a", preset=recipe, prompt_states=states, **options)

    controls = staticmethod(walk_controls)
    states = staticmethod(prompt_states)

    def step(self, session: WorldSession, **options: object) -> Chunk:
        """The chunk that belongs at the session's place in the recorded walk: the prompt changes with chunk 3."""
        index = len(session.history)
        if index == 3:
            session.set_prompt("b", states=prompt_states(1))
        return session.advance(walk_controls(index, session.history.start.preset.chunk), **options)

    @staticmethod
    def assert_same_chunk(got: Chunk, expected: Chunk) -> None:
        """Bitwise: latents, frames and poses."""
        assert got.index == expected.index
        assert torch.equal(got.latents, expected.latents), f"the latents of chunk {got.index} differ"
        assert torch.equal(got.frames, expected.frames), f"the frames of chunk {got.index} differ"
        assert np.array_equal(got.poses, expected.poses)

    @staticmethod
    def assert_same_caches(got: Sequence[KVCache], expected: Sequence[KVCache]) -> None:
        """Bitwise and slot by slot, for every branch and layer."""
        for mine, theirs in zip(got, expected, strict=True):
            assert mine.slot_frames == theirs.slot_frames
            assert mine.next_frame == theirs.next_frame
            for layer in range(mine.shape.layers):
                for a, b in zip(mine.view(layer), theirs.view(layer), strict=True):
                    assert torch.equal(a, b), f"layer {layer} differs"

    def steps(self, session: WorldSession, until: int) -> list[Chunk]:
        """Chunks up to number ``until`` of the recorded walk."""
        return [self.step(session) for _ in range(len(session.history), until)]


@dataclass(eq=False)
class Walk:
    """A session that nothing disturbed, kept with copies of its caches after every chunk."""

    chunks: list[Chunk]
    caches: list[list[KVCache]]
    session: WorldSession


class Walks:
    """Undisturbed walks, made when first asked for."""

    LENGTH = 7

    def __init__(self, small: SmallWorld) -> None:
        self._small = small
        self._made: dict[str, Walk] = {}
        self._stops: dict[tuple[str, int], WorldSession] = {}

    def __getitem__(self, recipe: str) -> Walk:
        if recipe not in self._made:
            session = self._small.start(recipe)
            walk = Walk([], [], session)
            for _ in range(self.LENGTH):
                walk.chunks.append(self._small.step(session))
                walk.caches.append([cache.clone() for cache in session._derived.caches])
            self._made[recipe] = walk
        return self._made[recipe]

    def fork(self, recipe: str, chunks: int) -> WorldSession:
        """A session of its own that has made the first ``chunks`` chunks; quick, because one such is kept."""
        key = (recipe, chunks)
        if key not in self._stops:
            self._stops[key] = self[recipe].session.fork(chunks)
        return self._stops[key].fork()


@dataclass
class Failing:
    """Raises ``error`` from a function once, at the call that brings ``calls_left`` to zero; armed by ``arm``."""

    function: Callable[..., object]
    error: BaseException
    calls_left: int = -1
    raised: int = field(default=0)

    def arm(self, call: int = 0) -> None:
        self.calls_left = call

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.calls_left -= 1
        if self.calls_left == -1:
            self.raised += 1
            raise self.error
        return self.function(*args, **kwargs)


@pytest.fixture(scope="session")
def small() -> SmallWorld:
    world = make_world()
    pixels = torch.rand(3, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(5)) * 2 - 1
    image = PreparedImage(pixels, HEIGHT, WIDTH, HEIGHT, WIDTH, "area", digest="a picture of noise")
    return SmallWorld(world, ImageCondition(world.vae, image))


@pytest.fixture(scope="session")
def walks(small: SmallWorld) -> Walks:
    return Walks(small)


@pytest.fixture(params=list(RECIPES))
def recipe(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def act_world() -> World:
    """A small world that is steered by actions."""
    return make_world("act", seed=3)


@pytest.fixture(scope="session")
def tiny_world() -> World:
    """The embedded model."""
    return World.load("tiny", device="cpu")


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Failing]:
    """``failing(owner, name, error)`` puts a Failing in the place of ``owner.name`` until the test ends."""

    def replace(owner: object, name: str, error: BaseException) -> Failing:
        wrapper = Failing(getattr(owner, name), error)
        monkeypatch.setattr(owner, name, wrapper)
        return wrapper

    return replace
