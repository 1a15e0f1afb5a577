"""Which attention runs: a choice is honoured or refused, never quietly replaced."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lingbot_core.errors import AttentionError
from lingbot_core.models.attention import BACKENDS, CPU_BACKENDS, PRIORITY, available_backends, sdpa


@pytest.fixture
def qkv() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(length, 3, 8, generator=generator) for length in (5, 9, 9))


def softmax_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) / q.shape[-1] ** 0.5
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v.double())


def enabled() -> set[str]:
    """The backends that PyTorch may use at this moment."""
    flags = torch.backends.cuda
    checks = {
        "flash": flags.flash_sdp_enabled,
        "math": flags.math_sdp_enabled,
        "efficient": flags.mem_efficient_sdp_enabled,
        "cudnn": flags.cudnn_sdp_enabled,
    }
    return {name for name, check in checks.items() if check()}


@pytest.mark.parametrize("choice", ["auto", *CPU_BACKENDS])
def test_attention_is_softmax_over_every_key(qkv, choice):
    out = sdpa(choice)(*qkv)
    assert out.shape == (5, 3, 8)
    assert (out.double() - softmax_attention(*qkv)).abs().max() < 1e-6


@pytest.mark.parametrize("choice", CPU_BACKENDS)
def test_a_chosen_backend_is_the_only_one_pytorch_may_use(qkv, choice, monkeypatch):
    seen = []
    run = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args: seen.append(enabled()) or run(*args))
    before = enabled()
    attention = sdpa(choice)
    attention(*qkv)
    attention(*qkv)
    assert seen == [{choice}, {choice}]
    assert enabled() == before


@pytest.mark.parametrize(("choice", "operator"), [("flash", "flash_attention"), ("math", "attention_math")])
def test_the_chosen_backends_operator_runs(qkv, choice, operator):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        sdpa(choice)(*qkv)
    names = {event.key for event in profile.key_averages() if "attention" in event.key}
    other = {"flash_attention", "attention_math"} - {operator}
    assert any(operator in name for name in names)
    assert not any(wrong in name for name in names for wrong in other)


def test_an_unknown_backend_is_refused_by_name():
    with pytest.raises(AttentionError, match="there is no attention backend 'sage'; use auto, cudnn, flash, efficient"):
        sdpa("sage")


@pytest.mark.parametrize("choice", ["cudnn", "efficient"])
def test_a_backend_that_needs_a_gpu_is_refused_on_the_cpu(qkv, choice):
    with pytest.raises(AttentionError, match=f"attention '{choice}' needs an NVIDIA GPU, but the model is on cpu"):
        sdpa(choice)(*qkv)


def test_input_that_the_chosen_backend_does_not_take_is_refused(qkv, monkeypatch):
    def no_kernel(*args: object) -> None:
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr(F, "scaled_dot_product_attention", no_kernel)
    with pytest.raises(
        AttentionError, match=r"'flash' does not support torch.float32 with head size 8 on cpu; use auto"
    ):
        sdpa("flash")(*qkv)

    def other(*args: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(F, "scaled_dot_product_attention", other)
    with pytest.raises(RuntimeError, match="out of memory"):
        sdpa("flash")(*qkv)


def test_what_is_offered_is_what_can_be_chosen():
    assert available_backends(torch.device("cpu")) == ("flash", "math")
    assert set(available_backends(torch.device("cuda"))) == set(BACKENDS)
    names = [name for backend in PRIORITY for name, other in BACKENDS.items() if other == backend]
    assert names == ["cudnn", "flash", "efficient", "math"]
