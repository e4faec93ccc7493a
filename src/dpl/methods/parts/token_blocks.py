"""The blocks of a vision transformer: put prompts between its tokens, and see its class token after every block."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dpl.core.errors import ModelError
from dpl.core.numerics import at_least_float32
from dpl.network.style_layer import prefix_tokens

__all__ = ["TokenBlocks"]

_FIRST_NORMS = ("norm1", "ln_1", "layernorm_before")  # of a block: timm, torchvision, Hugging Face


class TokenBlocks:
    """The blocks of one network."""

    def __init__(self, module: nn.Module) -> None:
        self.first, self.norms = _find_blocks(module)

    @property
    def count(self) -> int:
        """The number of blocks."""
        return 1 + len(self.norms)

    @contextmanager
    def prompted(self, prompt: Tensor | None) -> Iterator[list[Tensor]]:
        """Put prompts [P, d] behind the class token inside the block.

        The list fills with the class token after each block but the last, as the next block normalises it, [B, d].
        """
        seen: list[Tensor] = []

        def insert(_block: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            tokens = inputs[0]
            own = tokens.new_zeros(0, tokens.shape[2]) if prompt is None else prompt.to(tokens.dtype)
            return torch.cat([tokens[:, :1], own.expand(len(tokens), -1, -1), tokens[:, 1:]], dim=1), *inputs[1:]

        def watch(_norm: Any, _inputs: Any, output: Tensor) -> None:
            seen.append(at_least_float32(output[:, 0]))

        with ExitStack() as hooks:
            hooks.enter_context(self.first.register_forward_pre_hook(insert))
            for norm in self.norms:
                hooks.enter_context(norm.register_forward_hook(watch))
            yield seen


def _find_blocks(module: nn.Module) -> tuple[nn.Module, list[nn.Module]]:
    """Return the first block of a vision transformer, and the first norm of each block after it."""
    for owner in module.modules() if prefix_tokens(module) else ():
        blocks = list(owner.children())
        norms = [getattr(block, name) for block in blocks for name in _FIRST_NORMS if hasattr(block, name)]
        if blocks and len(norms) == len(blocks):
            return blocks[0], norms[1:]
    raise ModelError(
        "'foa' puts prompts into a vision transformer with a class token, and this network is none (blocks with "
        f"{' or '.join(_FIRST_NORMS)} were looked for); try 'lame', 't3a' or 'tent'"
    )
