"""The tiny text encoder: a real umT5 of 64 features over bytes, taught to tell the styles' words apart.

With random weights it mixes bytes without meaning, so that a transformer could only learn its few training sentences by
heart. Here it learns, apart from any picture, to say of free wordings which style they call for, or that they call for
none; the transformer then finds that in every one of its states. A minute on a CPU.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lingbot_core.models.text import TextEncoder, build_umt5, load_tokenizer, load_umt5

from .make_random_tiny import TEXT, random_weights, tokenizer_files, write_json
from .styles import PHRASES, STYLES

SEED = 20260302
TEXT_LEN = 128

# What else people call the styles; the last two of each are kept out of training and measure free wording.
WORDS: dict[str, tuple[str, ...]] = {
    "day": ("day", "sunny", "sunny day", "daylight", "blue sky", "green grass", "noon", "meadow", "clear morning",
            "summer day", "bright summer meadow", "midday sunshine"),
    "sunset": ("sunset", "sundown", "dusk", "evening", "golden hour", "orange sky", "evening light", "setting sun",
               "twilight", "warm evening", "orange dusk", "golden evening sky"),
    "night": ("night", "midnight", "moon", "moonlight", "dark", "stars", "starry sky", "moonlit", "darkness",
              "at night", "dark starry night", "under the moonlight"),
    "snow": ("snow", "snowy", "winter", "ice", "frost", "snowfall", "cold winter", "frozen", "icy",
             "white winter", "snow covered land", "frosty winter"),
    "desert": ("desert", "sand", "sandy", "dunes", "dry", "cactus", "sahara", "red rocks", "canyon",
               "hot sand", "sand dunes", "dry rocky desert"),
    "blossom": ("blossom", "cherry blossom", "pink trees", "spring", "pink flowers", "sakura", "petals", "pink garden",
                "flowering trees", "springtime", "blooming cherry trees", "pink spring garden"),
}  # fmt: skip
HELD_OUT = 2
FRAMES = (
    "{}", "a world of {}", "{} everywhere", "a walk through {}", "the scene is {}", "{}, wide view", "it is {} now",
    "a beautiful {} landscape", "exploring a place: {}", "{} with trees and boxes", "first person view, {}",
    "Photo of {}.", "change to {}", "{} scenery, high quality", "we see {} all around us",
)  # fmt: skip
NEW_FRAMES = ("now it turns into {}", "an open land, {}, calm", "Video of {} with pillars")
NONE = ("", "a world", "a walk with boxes", "trees and pillars", "a landscape", "first person view", "high quality",
        "moving camera", "an open land", "explore the place", "a game world", "objects on the ground")  # fmt: skip

# Words that say nothing about the style; made-up ones teach to pass over what is unknown.
FILLERS = (
    "a", "the", "of", "in", "with", "and", "at", "on", "under", "over", "near", "through", "very", "quite", "big",
    "small", "wide", "open", "quiet", "calm", "busy", "old", "new", "scene", "world", "place", "land", "view",
    "landscape", "picture", "photo", "video", "render", "shot", "street", "path", "hill", "field", "town", "trees",
    "boxes", "balls", "pillars", "walking", "moving", "slowly", "camera", "high", "quality", "detailed", "cinematic",
    "realistic", "cartoon", "style", "game", "level", "now", "then", "it", "is", "we", "see", "there", "beautiful",
    "strange", "far", "away", "everywhere", "around", "please", "show", "turn", "into", "become",
)  # fmt: skip


def _filler(rng: np.random.Generator) -> str:
    words = []
    for _ in range(rng.integers(0, 5)):
        made_up = "".join(rng.choice(list("abcdefghiklmnoprstuvw"), rng.integers(2, 8)))
        words.append(made_up if rng.random() < 0.15 else str(rng.choice(FILLERS)))
    return " ".join(words)


def wording(rng: np.random.Generator, style: int | None) -> str:
    """A random training sentence for a style, or for none."""
    if style is None:
        return str(rng.choice(NONE)) if rng.random() < 0.4 else _filler(rng)
    name = STYLES[style]
    choice = rng.random()
    words = PHRASES[name] if choice < 0.35 else WORDS[name][:-HELD_OUT]
    text = str(rng.choice(words))
    if choice > 0.6:
        text = f"{_filler(rng)} {text}{rng.choice(['', ',', '.'])} {_filler(rng)}".strip()
    elif choice > 0.15:
        text = str(rng.choice(FRAMES)).format(text)
    change = rng.random()
    return text.upper() if change < 0.05 else text.capitalize() if change < 0.3 else text


def unseen_wordings(new_words: bool) -> tuple[list[str], list[int]]:
    """Sentences that training never has, and their styles: new frames around words it knows, or around new words."""
    kept = slice(-HELD_OUT, None) if new_words else slice(-HELD_OUT)
    pairs = [(frame.format(words), i) for i, name in enumerate(STYLES) for words in WORDS[name][kept]
             for frame in NEW_FRAMES]  # fmt: skip
    return [text for text, _ in pairs], [style for _, style in pairs]


def encoder(folder: Path) -> TextEncoder:
    """The encoder in ``folder`` (text_encoder and tokenizer beneath it), in float32 on the CPU."""
    config = json.loads((folder / "text_encoder" / "config.json").read_text(encoding="utf-8"))
    weights = load_file(folder / "text_encoder" / "model.safetensors")
    model = load_umt5(build_umt5(config), weights, device="cpu", dtype=torch.float32)
    return TextEncoder(model, load_tokenizer(folder / "tokenizer"), max_tokens=TEXT_LEN)


def table(texts: TextEncoder, prompts: Sequence[str], text_len: int = TEXT_LEN) -> Tensor:
    """States of all prompts padded with zeros, float32 [P, text_len, features]: what `encode_prompt` starts from."""
    rows = [texts.encode(prompt).states.float() for prompt in prompts]
    return torch.stack([F.pad(row, (0, 0, 0, text_len - len(row))) for row in rows])


def _batch(texts: TextEncoder, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
    ids = [texts.tokens(prompt)[:TEXT_LEN] for prompt in prompts]
    longest = max(map(len, ids))
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in ids])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids])
    return tokens, mask


def probe(texts: TextEncoder, *, seed: int = 5, count: int = 600) -> dict[str, float]:
    """How well a linear map of the mean state tells styles apart: share of training sentences, of new sentences with
    known words, and of new sentences with new words."""
    rng = np.random.default_rng(seed)
    labels = [int(rng.integers(len(STYLES))) for _ in range(count)]
    seen = torch.stack([texts.encode(wording(rng, label)).states.mean(0) for label in labels])
    one = F.one_hot(torch.tensor(labels)).float()
    x = F.pad(seen, (0, 1), value=1.0)
    weights = torch.linalg.solve(x.T @ x + 0.1 * torch.eye(x.shape[1]), x.T @ one)

    def share(states: Tensor, truth: list[int]) -> float:
        return float(((F.pad(states, (0, 1), value=1.0) @ weights).argmax(1) == torch.tensor(truth)).float().mean())

    out = {"training": share(seen, labels)}
    for name, new_words in (("new_sentences", False), ("new_words", True)):
        sentences, truth = unseen_wordings(new_words)
        out[name] = share(torch.stack([texts.encode(text).states.mean(0) for text in sentences]), truth)
    return out


def train_text(folder: Path, *, steps: int = 1800, batch: int = 48, lr: float = 2e-3) -> dict[str, Any]:
    """Writes text_encoder/ and tokenizer/ beneath ``folder`` and returns what `probe` says before and after."""
    for name in ("text_encoder", "tokenizer"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    model = build_umt5(TEXT)
    load_umt5(model, random_weights(build_umt5(TEXT), torch.Generator().manual_seed(SEED)), dtype=torch.float32)
    tokenizer_files(folder / "tokenizer")
    texts = TextEncoder(model, load_tokenizer(folder / "tokenizer"), max_tokens=TEXT_LEN)
    report: dict[str, Any] = {"steps": steps, "before": probe(texts)}

    model.train().requires_grad_(True)
    judge = nn.Linear(TEXT["d_model"], len(STYLES) + 1)
    parameters = [*model.parameters(), *judge.parameters()]
    adam = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.01)
    rng = np.random.default_rng(SEED)
    for step in range(steps):
        labels = rng.integers(0, len(STYLES) + 1, batch)
        prompts = [wording(rng, None if label == len(STYLES) else int(label)) for label in labels]
        tokens, mask = _batch(texts, prompts)
        states = model(input_ids=tokens, attention_mask=mask).last_hidden_state
        target = torch.from_numpy(labels)
        mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        # Each single state shall know it too: the transformer weighs them as it likes.
        every = judge(states[mask.bool()])
        loss = F.cross_entropy(judge(mean), target)
        loss = loss + 0.5 * F.cross_entropy(every, target[:, None].expand_as(mask)[mask.bool()])
        for group in adam.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / steps))
        adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        adam.step()
    weights = {name: p.detach().half().contiguous() for name, p in model.named_parameters()}
    weights.pop("encoder.embed_tokens.weight", None)
    save_file(weights, folder / "text_encoder" / "model.safetensors")
    write_json(folder / "text_encoder" / "config.json", TEXT)
    report["after"] = probe(encoder(folder))
    return report


class Prompts:
    """All prompts a training uses as rows of one table; row 0 is the empty prompt."""

    def __init__(self, texts: TextEncoder, *, wordings: int = 12, seed: int = SEED, text_len: int = TEXT_LEN) -> None:
        rng = np.random.default_rng(seed)
        rows = [""]
        self._phrases: dict[str, int] = {"": 0}
        self._others: dict[str, list[int]] = {}
        for style, name in enumerate(STYLES):
            for phrase in PHRASES[name]:
                self._phrases[phrase] = len(rows)
                rows.append(phrase)
            free = [wording(rng, style) for _ in range(wordings)]
            others = list(range(len(rows), len(rows) + wordings))
            rows += free
            self._others.update(dict.fromkeys(PHRASES[name], others))
        self.rows = rows
        self.table = table(texts, rows, text_len)

    def indices(self, prompts: Sequence[Sequence[str]], seed: int, free: float = 0.4) -> Tensor:
        """Rows int64 [B, n]; ``free``: share of the sentences that are replaced by a freely worded one."""
        rng = np.random.default_rng(seed)
        out = []
        for clip in prompts:
            chosen: dict[str, int] = {}
            for text in clip:
                if text not in chosen:
                    others = self._others.get(text)
                    swap = bool(others) and rng.random() < free
                    chosen[text] = int(rng.choice(others)) if swap and others else self._phrases[text]
            out.append([chosen[text] for text in clip])
        return torch.tensor(out)
