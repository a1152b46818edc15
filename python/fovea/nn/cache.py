"""What a layer remembers of the tokens that it has seen."""

from __future__ import annotations

from torch import Tensor


class KVCache:
    """The past of one layer, made by its `make_cache` and filled by its calls.

    Attributes:
        tensors: by name: k and v [batch, max_seq_len, head, dim]; for latent layers k alone, the latents
            [batch, max_seq_len, 1, kv_latent + rope_dim]; for CCGQA also conv [batch, rows, channels] and shift
            [batch, 1, channels], the rows that its convolutions and its shift reach back to.
        length: how many tokens it holds.
        max_seq_len: how many it has room for.
    """

    def __init__(self, tensors: dict[str, Tensor], max_seq_len: int) -> None:
        self.tensors = tensors
        self.max_seq_len = max_seq_len
        self.length = 0
        self.room_word = f" max_seq_len={max_seq_len}"  # as the op reads it

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Adds keys and values [batch, new, head, dim], and returns all that there are now."""
        both = self._with_more(k, v)
        self.length = both[0].shape[1]
        return both

    def _with_more(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values with these after them. They are the cache's once its length says so."""
        end = self.length + k.shape[1]
        if end > self.max_seq_len:
            raise RuntimeError(f"KVCache: {end} tokens are too many, there is room for {self.max_seq_len}")
        for name, new in (("k", k), ("v", v)):
            batch, _, heads, dim = self.tensors[name].shape
            wanted = (batch, k.shape[1], heads, dim)
            for what, have, want in zip(("batch", "kv_len", "head_kv", "dim"), new.shape, wanted):
                if have != want:
                    raise RuntimeError(f"KVCache: {name}.{what} is {have}, must be {want}")
        for name, new in (("k", k), ("v", v)):
            self.tensors[name][:, self.length : end] = new
        return self.tensors["k"][:, :end], self.tensors["v"][:, :end]

    def reset(self) -> None:
        """Forgets everything: the next call begins a sequence."""
        self.length = 0

    def reorder(self, sequences: Tensor) -> None:
        """Sequence b goes on from what sequence sequences[b] was, as beam search asks for. sequences: [batch] int."""
        for name, tensor in self.tensors.items():
            self.tensors[name] = tensor.index_select(0, sequences)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in self.tensors.items())
        return f"KVCache({self.length} of {self.max_seq_len} tokens: {shapes})"
