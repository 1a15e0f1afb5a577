"""The transformer: names, sizes, precision, and what its cache means."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lingbot_core.camera.rays import camera_rays
from lingbot_core.engine.chunk import commit
from lingbot_core.errors import PromptError, WeightsError
from lingbot_core.models.dit import CausalWanDiT, ChunkContext, DiTConfig, float32_linear
from lingbot_core.models.kv_cache import KVCache

HEIGHT, WIDTH = 4, 6  # latents
CPU = torch.device("cpu")


@pytest.fixture
def dit(small) -> CausalWanDiT:
    return small.world.dit


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_context(
    small, dit: CausalWanDiT, index: int = 0, cache: KVCache | None = None, prompt: int = 0, device: torch.device = CPU
) -> ChunkContext:
    """Everything of chunk ``index`` (of 3 latent frames) of a picture of 32 x 48, its cache begun."""
    if cache is None:
        cache = KVCache(dit.cache_shape(HEIGHT, WIDTH), window=None, capacity=9, dtype=torch.float32, device=device)
    cache.begin(3 * index, 3)
    rays = camera_rays(small.controls(index, 3).relative, (40.0, 40.0, 24.0, 16.0), 32, 48)
    return ChunkContext(
        3 * index,
        noise(20, 3, HEIGHT, WIDTH, seed=50 + index).to(device),
        dit.encode_camera(rays.to(device)),
        dit.rope(3 * index, 3, HEIGHT, WIDTH, device),
        dit.encode_prompt(small.states(prompt).to(device)),
        cache,
    )


# Names and sizes


def expected_shapes(config: DiTConfig) -> dict[str, tuple[int, ...]]:
    """The published layout, written out from the model's description."""
    d, area = config.dim, math.prod(config.patch_size)
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, inner: int, outer: int) -> None:
        shapes[f"{name}.weight"] = (outer, inner)
        shapes[f"{name}.bias"] = (outer,)

    shapes["patch_embedding.weight"] = (d, config.in_dim, *config.patch_size)
    shapes["patch_embedding.bias"] = (d,)
    linear("patch_embedding_wancamctrl", {"cam": 6, "act": 7}[config.control] * 64 * area, d)
    for i in (1, 2):
        linear(f"c2ws_hidden_states_layer{i}", d, d)
    linear("text_embedding.0", config.text_dim, d)
    linear("text_embedding.2", d, d)
    linear("time_embedding.0", config.freq_dim, d)
    linear("time_embedding.2", d, d)
    linear("time_projection.1", d, 6 * d)
    for i in range(config.num_layers):
        block = f"blocks.{i}"
        shapes[f"{block}.modulation"] = (1, 6, d)
        for attention in ("self_attn", "cross_attn"):
            for name in "qkvo":
                linear(f"{block}.{attention}.{name}", d, d)
            for name in ("norm_q", "norm_k"):
                shapes[f"{block}.{attention}.{name}.weight"] = (d,)
        shapes[f"{block}.norm3.weight"] = shapes[f"{block}.norm3.bias"] = (d,)
        linear(f"{block}.ffn.0", d, config.ffn_dim)
        linear(f"{block}.ffn.2", config.ffn_dim, d)
        for name in ("cam_injector_layer1", "cam_injector_layer2", "cam_scale_layer", "cam_shift_layer"):
            linear(f"{block}.{name}", d, d)
    shapes["head.modulation"] = (1, 2, d)
    linear("head.head", d, area * config.out_dim)
    return shapes


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize(("control", "parameters"), [("cam", 18_544_332_864), ("act", 18_545_643_584)])
def test_the_full_model_has_the_published_names_shapes_and_parameter_count(control, parameters):
    config = DiTConfig(control=control)
    shapes = shapes_of(CausalWanDiT(config, device="meta"))
    assert shapes == expected_shapes(config)
    assert len(shapes) == 1421
    assert sum(math.prod(shape) for shape in shapes.values()) == parameters


@pytest.mark.parametrize(
    "config",
    [
        DiTConfig(),
        DiTConfig(control="act"),
        DiTConfig(dim=48, ffn_dim=80, num_layers=2, num_heads=3, freq_dim=16, text_dim=24, text_len=7, out_dim=8),
    ],
)
def test_every_size_is_read_off_the_shapes(config):
    shapes = expected_shapes(config)
    assert DiTConfig.from_shapes(shapes, num_heads=config.num_heads, text_len=config.text_len) == config


def test_a_plain_wan_checkpoint_is_refused_naming_what_is_missing():
    shapes = {k: v for k, v in expected_shapes(DiTConfig()).items() if "cam" not in k and "c2ws" not in k}
    with pytest.raises(WeightsError) as error:
        DiTConfig.from_shapes(shapes, num_heads=40)
    for name in ("patch_embedding_wancamctrl.weight", "blocks.0.cam_scale_layer.weight", "plain Wan"):
        assert name in str(error.value)
    assert "patch_embedding.weight" not in str(error.value)


def test_an_unknown_control_and_heads_that_do_not_fit_are_refused():
    shapes = expected_shapes(DiTConfig())
    with pytest.raises(WeightsError, match="takes 1000 features"):
        DiTConfig.from_shapes({**shapes, "patch_embedding_wancamctrl.weight": (5120, 1000)}, num_heads=40)
    for heads in (39, 1024):  # 1024 heads of 5, which is odd
        with pytest.raises(WeightsError, match=f"a width of 5120 cannot be split over {heads} heads"):
            DiTConfig.from_shapes(shapes, num_heads=heads)


def test_every_linear_and_convolution_comes_from_the_injected_operations(small, dit):
    made: list[nn.Module] = []
    called: set[nn.Module] = set()

    class Operations:
        class Linear(nn.Linear):
            def __init__(self, *args, **kwargs) -> None:
                super().__init__(*args, **kwargs)
                made.append(self)

            def forward(self, x: Tensor) -> Tensor:
                called.add(self)
                return super().forward(x)

        class Conv3d(nn.Conv3d):
            def __init__(self, *args, **kwargs) -> None:
                super().__init__(*args, **kwargs)
                made.append(self)

            def forward(self, x: Tensor) -> Tensor:
                called.add(self)
                return super().forward(x)

    other = CausalWanDiT(dit.config, operations=Operations)
    other.load_state_dict(dit.state_dict())
    layers = [m for m in other.modules() if isinstance(m, nn.Linear | nn.Conv3d)]
    assert set(made) == set(layers)
    assert len(made) == 14 * dit.config.num_layers + 10
    with torch.inference_mode():
        x = noise(16, 3, HEIGHT, WIDTH)
        got = other(x, 500.0, make_context(small, other))
        assert called == set(made)
        assert torch.equal(got, dit(x, 500.0, make_context(small, dit)))


def test_a_hosts_linear_that_casts_is_called_as_it_is():
    """Its patches and its streaming live in its own forward."""

    class Casting(nn.Linear):
        comfy_cast_weights = True

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.bfloat16()).float() + 100

    layer = Casting(4, 4, dtype=torch.bfloat16)
    assert (float32_linear(layer, torch.zeros(1, 4)) > 50).all()
    plain = nn.Linear(4, 4, dtype=torch.bfloat16)
    x = noise(3, 4)
    exact = x.double() @ plain.weight.double().T + plain.bias.double()
    assert (float32_linear(plain, x) - exact).abs().max() < 1e-6


# A forward


class NoHostSync(TorchDispatchMode):
    """Fails on every operation that needs a tensor's value on the host."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "item", "is_nonzero", "masked_select", "equal", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        name = func.__name__.split(".")[0]
        assert name not in self.FORBIDDEN, f"{func} makes the host wait"
        return func(*args, **(kwargs or {}))


def test_a_forward_and_a_commit_never_make_the_host_wait(small, dit):
    with torch.inference_mode():
        x = noise(16, 3, HEIGHT, WIDTH)
        with NoHostSync() as guard:
            context = make_context(small, dit)
            dit(x, 937.5, context)
            dit.remember(x, 0.0, context)
        assert guard.count > 100
        with NoHostSync(), pytest.raises(AssertionError, match="makes the host wait"):
            x.sum().item()


def test_a_forward_runs_where_no_value_exists_at_all(small, dit):
    """On the meta device a tensor has no value to wait for, and nothing can be mixed in from the CPU."""
    meta = torch.device("meta")
    ghost = copy.deepcopy(dit).to(meta)
    context = make_context(small, ghost, device=meta)
    x = torch.empty(16, 3, HEIGHT, WIDTH, device=meta)
    flow = ghost(x, 999.0, context)
    ghost.remember(x, 0.0, context)
    assert flow.device == meta
    assert flow.shape == x.shape


@torch.inference_mode()
def test_a_forward_and_a_commit_write_the_same_keys_and_values(small, dit):
    x = noise(16, 3, HEIGHT, WIDTH)
    contexts = [make_context(small, dit) for _ in range(2)]
    dit(x, 0.0, contexts[0])
    commit(dit, [contexts[1]], x)
    for layer in range(dit.config.num_layers):
        for whole, short in zip(contexts[0].cache.view(layer), contexts[1].cache.view(layer), strict=True):
            assert torch.equal(whole, short)
    dit(x, 500.0, contexts[0])
    assert not torch.equal(contexts[0].cache.view(1)[0], contexts[1].cache.view(1)[0])


@torch.inference_mode()
def test_the_commit_stops_at_the_last_layers_keys_and_values(small, dit):
    calls: list[str] = []
    names = {module: name for name, module in dit.named_modules()}
    hooks = [m.register_forward_hook(lambda m, *_: calls.append(names[m])) for m in names]
    context = make_context(small, dit)
    calls.clear()
    dit.remember(noise(16, 3, HEIGHT, WIDTH), 0.0, context)
    for hook in hooks:
        hook.remove()
    last = [name for name in calls if name.startswith("blocks.2.")]
    assert sorted(last) == ["blocks.2.self_attn.k", "blocks.2.self_attn.v"]
    assert not any(name.startswith("head") for name in calls)


@torch.inference_mode()
def test_joined_projections_give_what_three_do_until_a_weight_is_replaced(small, dit):
    joined = copy.deepcopy(dit)
    joined.join()
    assert shapes_of(joined) == shapes_of(dit)
    products = []
    x = noise(16, 3, HEIGHT, WIDTH)
    expected = dit(x, 700.0, make_context(small, dit))
    for layer in (joined.blocks[0].self_attn.q, joined.blocks[1].self_attn.q):
        layer.register_forward_hook(lambda layer, *_: products.append(layer))
    assert torch.allclose(joined(x, 700.0, make_context(small, joined)), expected, atol=1e-5)
    assert not products
    attention = joined.blocks[0].self_attn
    attention.q.weight = nn.Parameter(attention.q.weight + 1, requires_grad=False)
    assert not torch.allclose(joined(x, 700.0, make_context(small, joined)), expected, atol=1e-3)
    assert products == [attention.q]
    joined.double().float()  # every weight moves, and the joint ones stay behind
    for block in joined.blocks:
        block.self_attn.v.weight.data.mul_(2)
    products.clear()
    joined(x, 700.0, make_context(small, joined))
    assert len(products) == 2


@torch.inference_mode()
def test_a_forward_overwrites_what_the_one_before_it_left_in_the_cache(small, dit):
    fresh, used = make_context(small, dit), make_context(small, dit)
    x = noise(16, 3, HEIGHT, WIDTH)
    dit(noise(16, 3, HEIGHT, WIDTH, seed=1), 999.0, used)
    assert torch.equal(dit(x, 825.0, used), dit(x, 825.0, fresh))


def test_states_longer_than_the_text_length_or_of_another_width_are_refused(dit):
    with pytest.raises(PromptError, match="text states of 13 tokens do not fit this model, which takes 1 to 12"):
        dit.encode_prompt(torch.zeros(13, 20))
    with pytest.raises(PromptError, match="text states of 0 tokens"):
        dit.encode_prompt(torch.zeros(0, 20))
    with pytest.raises(PromptError, match=r"shape \[4, 4096\] do not fit this model, which takes \[L, 20\]"):
        dit.encode_prompt(torch.zeros(4, 4096))


@torch.inference_mode()
def test_a_prompt_is_padded_with_zeros_before_the_text_embedding(dit):
    states = noise(5, 20)
    short, padded = dit.encode_prompt(states), dit.encode_prompt(torch.cat([states, torch.zeros(7, 20)]))
    assert short.keys[0].shape == (12, 2, 32)
    assert short.nbytes == 2 * 3 * 12 * 64 * 4
    for a, b in zip((*short.keys, *short.values), (*padded.keys, *padded.values), strict=True):
        assert torch.equal(a, b)
    # The padding rows are rows like any other: the embedding's bias makes them non-zero.
    assert short.values[0][5:].abs().max() > 0.01


@torch.inference_mode()
def test_the_time_embedding_is_that_of_one_exact_sinusoid(dit):
    def silu(x: Tensor) -> Tensor:
        return x / (1 + torch.exp(-x))

    weights = {name: tensor.double() for name, tensor in dit.state_dict().items()}

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    for t in (0.0, 833.3333333333334, 999.0):
        angles = [t * 10000 ** (-i / 16) for i in range(16)]
        sinusoid = torch.tensor([[*map(math.cos, angles), *map(math.sin, angles)]], dtype=torch.float64)
        embedding = linear("time_embedding.2", silu(linear("time_embedding.0", sinusoid)))
        rows = linear("time_projection.1", silu(embedding)).view(6, 64)
        time = dit.encode_time(t, CPU)
        assert time.embedding.shape == (1, 64)
        assert time.rows.dtype == time.embedding.dtype == torch.float32
        assert (time.embedding - embedding).abs().max() < 1e-5
        assert (time.rows - rows).abs().max() < 1e-5


# Precision


@contextlib.contextmanager
def outputs(modules: dict[str, nn.Module]) -> Iterator[dict[str, Any]]:
    seen: dict[str, Any] = {}
    hooks = [m.register_forward_hook(lambda m, i, out, n=n: seen.update({n: out})) for n, m in modules.items()]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@pytest.fixture(scope="module")
def half(small) -> CausalWanDiT:
    """The same model in bfloat16."""
    dit = CausalWanDiT(small.world.dit.config, dtype=torch.bfloat16)
    dit.load_state_dict(small.world.dit.state_dict())
    return dit.eval().requires_grad_(False)


@torch.inference_mode()
def test_in_bfloat16_the_residual_stays_float32_and_the_branches_do_not(small, half):
    modules = {name: module for name, module in half.named_modules() if name}
    context = make_context(small, half)
    with outputs(modules) as seen:
        flow = half(noise(16, 3, HEIGHT, WIDTH), 825.0, context)
    assert flow.dtype == torch.float32
    for i in range(half.config.num_layers):
        assert seen[f"blocks.{i}"][0].dtype == torch.float32
        for branch in ("self_attn", "cross_attn", "ffn.2", "self_attn.q", "cross_attn.o"):
            assert seen[f"blocks.{i}.{branch}"].dtype == torch.bfloat16
        assert context.camera.scales[i].dtype == torch.bfloat16
    assert seen["patch_embedding"].dtype == torch.bfloat16
    time = half.encode_time(825.0, CPU)
    assert time.rows.dtype == torch.float32
    assert len(time.rows.unique()) > 6 * 48, "the time path was rounded to bfloat16"


@torch.inference_mode()
def test_in_bfloat16_the_result_is_close_to_float32(small, dit, half):
    rounded = CausalWanDiT(dit.config)
    rounded.load_state_dict({name: tensor.float() for name, tensor in half.state_dict().items()})
    x = noise(16, 3, HEIGHT, WIDTH)
    caches = [None, None]
    for index in range(2):
        contexts = [make_context(small, m, index, c) for m, c in zip((half, rounded), caches, strict=True)]
        got, expected = (m(x, 825.0, c) for m, c in zip((half, rounded), contexts, strict=True))
        caches = [context.cache for context in contexts]
        for cache in caches:
            cache.end()
        error = ((got - expected).norm() / expected.norm()).item()
        print(f"\nchunk {index}: {error:.1e} relative")
        assert 1e-5 < error < 0.02


@torch.inference_mode()
def test_a_cache_of_another_dtype_than_the_model_works(small, dit):
    shape = dit.cache_shape(HEIGHT, WIDTH)
    cache = KVCache(shape, window=None, dtype=torch.bfloat16, device=CPU)
    x = noise(16, 3, HEIGHT, WIDTH)
    got, expected = dit(x, 825.0, make_context(small, dit, cache=cache)), dit(x, 825.0, make_context(small, dit))
    assert 0 < (got - expected).norm() / expected.norm() < 0.02


# What the cache means


def block_causal_keys_and_values(
    dit: CausalWanDiT, latents: Tensor, condition: Tensor, rays: Tensor, prompts: list[Tensor], chunk: int
) -> list[tuple[Tensor, Tensor]]:
    """Keys (rotated) and values of every layer, from ONE forward over all clean latents at time 0.

    Plain float64 operations on the weights: all chunks in one sequence, each token sees the tokens of its own chunk
    and of all chunks before it. Shares no code with the model.
    """
    w = {name: tensor.double() for name, tensor in dit.state_dict().items()}
    config = dit.config
    dim, heads = config.dim, config.num_heads
    frames, height, width = latents.shape[1:]
    rows, columns = height // 2, width // 2
    tokens = frames * rows * columns
    chunk_of = torch.arange(tokens) // (chunk * rows * columns)

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def layer_norm(x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.pow(2).mean(-1, keepdim=True) + config.eps).sqrt()

    def rms(name: str, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.eps).sqrt() * w[f"{name}.weight"]

    def silu(x: Tensor) -> Tensor:
        return x / (1 + torch.exp(-x))

    def gelu(x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    def split(x: Tensor) -> Tensor:
        return x.view(len(x), heads, dim // heads).transpose(0, 1)

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = split(q) @ split(k).transpose(1, 2) / math.sqrt(dim // heads)
        return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ split(v)).transpose(0, 1).reshape(len(q), dim)

    def patches(x: Tensor) -> Tensor:
        """[c, frames, h, w] -> [tokens, c * 4], the 2 x 2 patch innermost."""
        x = x.double().reshape(len(x), frames, rows, 2, columns, 2)
        return x.permute(1, 2, 4, 0, 3, 5).reshape(tokens, -1)

    pairs = dim // heads // 2
    spatial = pairs // 3
    position = torch.stack(
        torch.meshgrid(torch.arange(frames), torch.arange(rows), torch.arange(columns), indexing="ij"), -1
    ).reshape(tokens, 3)
    angles = torch.cat(
        [
            position[:, axis, None].double() * 10000.0 ** (-torch.arange(n, dtype=torch.float64) / n)
            for axis, n in enumerate((pairs - 2 * spatial, spatial, spatial))
        ],
        -1,
    )

    def rotate(x: Tensor) -> Tensor:
        complexes = torch.view_as_complex(x.view(tokens, heads, pairs, 2))
        return torch.view_as_real(complexes * torch.polar(torch.ones_like(angles), angles)[:, None]).reshape(
            tokens, dim
        )

    sinusoid = torch.cat([torch.ones(config.freq_dim // 2), torch.zeros(config.freq_dim // 2)]).double()
    time = linear("time_projection.1", silu(linear("time_embedding.2", silu(linear("time_embedding.0", sinusoid)))))
    camera = linear("patch_embedding_wancamctrl", patches(rays[0]))
    camera = camera + linear("c2ws_hidden_states_layer2", silu(linear("c2ws_hidden_states_layer1", camera)))
    texts = [
        linear(
            "text_embedding.2", gelu(linear("text_embedding.0", nn.functional.pad(p.double(), (0, 0, 0, 12 - len(p)))))
        )
        for p in prompts
    ]
    text = torch.cat(texts)
    sees_text = chunk_of[:, None] == (torch.arange(len(text)) // 12)[None]
    sees = chunk_of[:, None] >= chunk_of[None]

    x = patches(torch.cat([latents, condition])) @ w["patch_embedding.weight"].reshape(dim, -1).T
    x = x + w["patch_embedding.bias"]
    out = []
    for i in range(config.num_layers):
        b = f"blocks.{i}"
        shift1, scale1, gate1, shift2, scale2, gate2 = w[f"{b}.modulation"][0] + time.view(6, dim)
        h = layer_norm(x) * (1 + scale1) + shift1
        q, k, v = (linear(f"{b}.self_attn.{name}", h) for name in "qkv")
        q, k = rotate(rms(f"{b}.self_attn.norm_q", q)), rotate(rms(f"{b}.self_attn.norm_k", k))
        out.append((k.view(tokens, heads, -1), v.view(tokens, heads, -1)))
        x = x + linear(f"{b}.self_attn.o", attend(q, k, v, sees)) * gate1
        c = camera + linear(f"{b}.cam_injector_layer2", silu(linear(f"{b}.cam_injector_layer1", camera)))
        x = (1 + linear(f"{b}.cam_scale_layer", c)) * x + linear(f"{b}.cam_shift_layer", c)
        h = layer_norm(x) * w[f"{b}.norm3.weight"] + w[f"{b}.norm3.bias"]
        q = rms(f"{b}.cross_attn.norm_q", linear(f"{b}.cross_attn.q", h))
        k = rms(f"{b}.cross_attn.norm_k", linear(f"{b}.cross_attn.k", text))
        v = linear(f"{b}.cross_attn.v", text)
        x = x + linear(f"{b}.cross_attn.o", attend(q, k, v, sees_text))
        h = layer_norm(x) * (1 + scale2) + shift2
        x = x + linear(f"{b}.ffn.2", gelu(linear(f"{b}.ffn.0", h))) * gate2
    return out


def test_without_a_window_the_cache_is_one_block_causal_forward_over_all_clean_latents(small, walks):
    session = walks["whole-past"].session
    records, start = session.history.chunks, session.history.start
    latents = torch.cat([record.latents for record in records], dim=1)
    rays = torch.cat(
        [camera_rays(r.controls.relative, start.intrinsics, start.height, start.width) for r in records], dim=2
    )
    condition = small.condition.latents(0, latents.shape[1])
    prompts = [small.states({"a": 0, "b": 1}[record.prompt]) for record in records]
    expected = block_causal_keys_and_values(small.world.dit, latents, condition, rays, prompts, 3)
    (cache,) = session._derived.caches
    assert cache.slot_frames == tuple(range(21))
    worst = 0.0
    for layer, wanted in enumerate(expected):
        for got, exact in zip(cache.view(layer), wanted, strict=True):
            worst = max(worst, (got - exact).abs().max().item())
    print(f"\nworst difference {worst:.1e}")
    assert worst < 1e-4


@torch.inference_mode()
def test_the_same_holds_for_a_picture_with_rows_and_columns_of_tokens(small, dit):
    chunks = 3
    latents = [noise(16, 3, HEIGHT, WIDTH, seed=i) for i in range(chunks)]
    cache, contexts = None, []
    for index, x in enumerate(latents):
        context = make_context(small, dit, index, cache, prompt=index)
        cache = context.cache
        commit(dit, [context], x)
        cache.end()
        contexts.append(context)
    rays = [camera_rays(small.controls(i, 3).relative, (40.0, 40.0, 24.0, 16.0), 32, 48) for i in range(chunks)]
    expected = block_causal_keys_and_values(
        dit,
        torch.cat(latents, dim=1),
        torch.cat([context.condition for context in contexts], dim=1),
        torch.cat(rays, dim=2),
        [small.states(i) for i in range(chunks)],
        3,
    )
    for layer, wanted in enumerate(expected):
        for got, exact in zip(cache.view(layer), wanted, strict=True):
            assert (got - exact).abs().max() < 1e-4
