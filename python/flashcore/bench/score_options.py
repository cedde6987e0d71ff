"""Random tensors of the options that change scores, and what they do to the scores of a reference row."""

from typing import Any

from flashcore.bench.options import CaseOptions
from flashcore.block_mask import BlockMask

_SMALL_CAP = 256  # docs/numerics.md


class ScoreOptions:
    """Mask, bias and slopes of a case. All sets of its inputs share them."""

    def __init__(self, torch: Any, case: Any, device: str, generator: Any, dtype: Any) -> None:
        """dtype: the dtype of the bias."""
        self.torch, self.case, self.device, self.generator = torch, case, device, generator
        options: CaseOptions = case.options
        self.mask: Any = self._mask(options)
        self.block_mask: BlockMask | None = None
        if options.documents:
            length = case.kv_len // options.documents
            self.block_mask = BlockMask.documents([length] * options.documents)
        if options.mask == "tree":
            self.block_mask = BlockMask.tree(self._parents(), case.kv_len - case.q_len)
        self.bias = self._random(torch.randn, 1, 1, case.q_len, case.kv_len).to(dtype) if options.bias else None
        self.alibi_slopes: Any = None
        if options.alibi:  # as in the paper: a geometric series
            heads = torch.arange(1, case.q_heads + 1, device=device, dtype=torch.float32)
            self.alibi_slopes = 2 ** (-8 * heads / case.q_heads)

    def _random(self, draw: Any, *shape: int) -> Any:
        return draw(shape, generator=self.generator, device=self.device)

    def _mask(self, options: CaseOptions) -> Any:
        case = self.case
        if options.mask == "padding":  # up to a quarter of each sequence but the first
            least = 0.75 + 0.25 * self._random(self.torch.rand, case.batch)
            least[0] = 1.0
            lengths = (least * case.kv_len).round()
            return (self.torch.arange(case.kv_len, device=self.device) < lengths[:, None])[:, None, None]
        if options.mask == "random":
            return self._random(self.torch.rand, 1, 1, case.q_len, case.kv_len) < 0.5
        return None

    def _parents(self) -> list[int]:
        """Each token but the first has a random earlier one as its parent."""
        draws = self._random(self.torch.rand, self.case.q_len).tolist()
        return [int(draw * token) if token else -1 for token, draw in enumerate(draws)]

    def arguments(self) -> dict[str, Any]:
        """Keywords of flashcore.attention()."""
        given = {"mask": self.mask if self.block_mask is None else self.block_mask, "bias": self.bias,
                 "alibi_slopes": self.alibi_slopes, "softcap": self.case.options.softcap or None}
        return {name: one for name, one in given.items() if one is not None}

    def tensors(self, q: Any) -> dict[str, tuple[Any, str]]:
        """{field of flashcore_params: (tensor, dtype)}."""
        given = {"mask": (self.mask, "bool"), "bias": (self.bias, self.case.q_dtype),
                 "alibi_slopes": (self.alibi_slopes, "f32")}
        if self.block_mask is not None:
            blocks, bits = self.block_mask.arrays(q)
            given.update(mask_blocks=(blocks, "i32"), mask_bits=(bits, "i32"))
        return {name: one for name, one in given.items() if one[0] is not None}

    def hidden(self, row: tuple[int, int, int], keys: slice) -> Any:
        """Which keys of a row its mask hides, as booleans; None without a mask of single keys."""
        b, _, i = row
        if self.case.options.mask == "tree":
            assert self.block_mask is not None
            return ~self.block_mask.to_dense(self.torch.empty(0, device=self.device))[0, 0, i, keys]
        if self.mask is None:
            return None
        return ~self.mask[b % self.mask.shape[0], 0, i % self.mask.shape[2], keys]

    def modified(self, row: tuple[int, int, int], keys: slice, score: Any, magnitude: Any) -> tuple[Any, Any]:
        """Scores of a row and their magnitudes with softcap, ALiBi, bias and mask (docs/numerics.md)."""
        b, h, i = row
        cap = self.case.options.softcap
        if cap:
            score = cap * (score / cap).tanh()
            magnitude = magnitude + (cap if cap <= _SMALL_CAP else 0.0)
        if self.alibi_slopes is not None:
            position = i + self.case.lengths()[b] - self.case.q_lengths()[b]
            at = self.torch.arange(keys.start, keys.stop, device=self.device, dtype=self.torch.float64)
            term = self.alibi_slopes[h].double() * (at - position).abs()
            score, magnitude = score - term, magnitude + term
        if self.bias is not None:
            term = self.bias[0, 0, i, keys].double()
            score, magnitude = score + term, magnitude + term.abs()
        hidden = self.hidden(row, keys)
        if hidden is not None:
            score, magnitude = score.masked_fill(hidden, -float("inf")), magnitude.masked_fill(hidden, 0.0)
        return score, magnitude
