"""The key-value cache of generation."""

from torch import Tensor


class KVCache:
    """Keys and values of the tokens read so far, with room for max_len tokens (allocated at the first)."""

    def __init__(self, max_len: int):
        self.max_len = max_len
        self.length = 0  # tokens held; GPT advances it once all layers have appended theirs
        self.first = 0  # tokens before it are no longer visible: they belong to another document
        self.k: dict[int, Tensor] = {}
        self.v: dict[int, Tensor] = {}

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v (B, H, new, D) of one layer; return those from `first` on, (B, H, seen, D)."""
        if layer not in self.k:
            shape = (*k.shape[:2], self.max_len, k.size(3))
            self.k[layer], self.v[layer] = k.new_empty(shape), v.new_empty(shape)
        end = self.length + k.size(2)
        self.k[layer][:, :, self.length : end] = k
        self.v[layer][:, :, self.length : end] = v
        return self.k[layer][:, :, self.first : end], self.v[layer][:, :, self.first : end]
