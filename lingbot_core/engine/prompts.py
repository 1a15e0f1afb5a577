"""The prompts of one session: their text states, and the cross-attention keys and values made of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import PromptError
from ..models.dit import CrossKV
from .transfer import to_device
from .world import World

# Prompts that were set but never made a chunk: kept, because controls may name them later, but not for ever.
SPARE_PROMPTS = 32


@dataclass(frozen=True, eq=False)
class PromptStates:
    """Text states [L, text_dim] by prompt, and those of the negative prompt; nobody changes them."""

    positive: Mapping[str, Tensor] = field(default_factory=dict)
    negative: Tensor | None = None


class Prompts:
    """States by prompt text; keys and values of the current prompt and of the negative one.

    Forks share the states, which are never changed, but not the keys and values.
    """

    def __init__(self, world: World, states: Mapping[str, Tensor], negative: Tensor | None = None) -> None:
        """states, negative: given in place of the world's own text encoder; copied."""
        self._world = world
        self._states = {prompt: _checked(prompt, given) for prompt, given in states.items()}
        self._given = set(self._states)  # texts whose states the world's own encoder might not make again
        self._forgotten: set[str] = set()
        # Apart from the others: the same text may stand for other states there.
        self._negative_states = None if negative is None else _checked("(negative)", negative)
        self._current: tuple[str, CrossKV] | None = None
        self._negative: CrossKV | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of states, keys and values."""
        kept = (self._current[1] if self._current else None, self._negative)
        return sum(x.nbytes for x in (*kept, *self._states.values(), self._negative_states) if x is not None)

    @property
    def cross_nbytes(self) -> int:
        """Bytes of the keys and values alone."""
        kept = (self._current[1] if self._current else None, self._negative)
        return sum(x.nbytes for x in kept if x is not None)

    @property
    def given(self) -> PromptStates:
        """All states that are known."""
        return PromptStates(dict(self._states), self._negative_states)

    def release(self) -> None:
        """Forgets the keys and values; they are made again from the states when needed."""
        self._current, self._negative = None, None

    def cross(self, prompt: str) -> CrossKV:
        """Keys and values of a prompt; encoded when it is not the current one."""
        if prompt in self._states:
            self._states[prompt] = self._states.pop(prompt)  # the latest is at the end
        if self._current is None or self._current[0] != prompt:
            self._current = (prompt, self._world.dit.encode_prompt(self._states_of(prompt)))
        return self._current[1]

    def negative(self, prompt: str) -> CrossKV:
        """Keys and values of the negative prompt, which is the same all along; encoded once."""
        if self._negative is None:
            if self._negative_states is None:
                self._negative_states = self._world.encode_text(prompt)
            self._negative = self._world.dit.encode_prompt(to_device(self._negative_states, self._world.device))
        return self._negative

    def give(self, prompt: str, states: Tensor, *, used: Collection[str]) -> None:
        """Sets the states of a prompt. used: texts that chunks were already made with.

        A history knows a prompt by its text alone, so a used text cannot stand for other states: PromptError.
        """
        states = _checked(prompt, states)
        known = self._states.get(prompt)
        if known is not None and prompt in used and not torch.equal(known.to(states), states):
            raise PromptError(
                f"the prompt {_shown(prompt)} is in this session's history with other text states; give the new states "
                "another text"
            )
        cross = self._world.dit.encode_prompt(states.to(self._world.device))
        self._states[prompt] = states
        self._given.add(prompt)
        self._forgotten.discard(prompt)
        self._current = (prompt, cross)

    def tidy(self, used: Collection[str]) -> None:
        """Keeps the states of used prompts, which a replay needs, and of the latest others."""
        spare = [prompt for prompt in self._states if prompt not in used]
        for prompt in spare[:-SPARE_PROMPTS]:
            del self._states[prompt]
            if prompt in self._given:
                self._forgotten.add(prompt)

    def fork(self) -> Prompts:
        """The same states, with keys and values of its own."""
        twin = Prompts(self._world, self._states, self._negative_states)
        twin._given, twin._forgotten = set(self._given), set(self._forgotten)
        return twin

    def clear(self) -> None:
        """Forgets everything."""
        self._states, self._negative_states, self._current, self._negative = {}, None, None, None

    def _states_of(self, prompt: str) -> Tensor:
        if prompt in self._forgotten:
            raise PromptError(
                f"the text states given for {_shown(prompt)} made no chunk and were followed by {SPARE_PROMPTS} other "
                "prompts, so they were not kept; give them again"
            )
        if prompt not in self._states:
            self._states[prompt] = self._world.encode_text(prompt)
        return to_device(self._states[prompt], self._world.device)


def _checked(prompt: str, states: Tensor) -> Tensor:
    """A copy that nobody else can change; PromptError for what are no text states."""
    if not isinstance(states, Tensor) or not states.is_floating_point():
        raise PromptError(f"the text states of {_shown(prompt)} must be a floating point tensor [L, text_dim]")
    if not torch.isfinite(states).all():
        raise PromptError(f"the text states of {_shown(prompt)} hold NaN or infinity; encode the prompt again")
    return states.detach().clone()


def _shown(prompt: str) -> str:
    return repr(prompt if len(prompt) <= 40 else prompt[:37] + "...")
