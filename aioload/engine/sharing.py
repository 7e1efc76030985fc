"""Sharing: whether somebody else draws from the generators of a pass, between the draws of its own."""

from collections.abc import Sequence
from typing import Any

import torch

from aioload.engine.generators import encoded


class Sharing:
    """Knows what the pass left generators like. What others do to them cannot be drawn again, so it must be saved.

    Args:
        generators: Those that the pass draws from.
        is_shared: Whether others have drawn from them since the pass began.
    """

    def __init__(self, generators: Sequence[torch.Generator], *, is_shared: bool = False) -> None:
        self.generators, self.is_shared = generators, is_shared
        self._left = self._present()

    def has_moved(self) -> bool:
        """Whether others have drawn since :meth:`leave`."""
        return self._present() != self._left

    def leave(self) -> None:
        """Note what the generators are like behind a draw of the pass."""
        self._left = self._present()

    def state(self) -> dict[str, Any]:
        """Return, for JSON, what the generators are like, if drawing again would not bring that about."""
        if not self.is_shared and not self.has_moved():
            return {}
        return {"generators_now": [encoded(each.get_state()) for each in self.generators]}

    def _present(self) -> list[bytes]:
        return [each.get_state().numpy().tobytes() for each in self.generators]  # 2 us each
