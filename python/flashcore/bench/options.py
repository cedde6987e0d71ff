"""The options of a benchmark case, and the cases that it is compared with."""

from dataclasses import asdict, dataclass, replace
from typing import Any

MASKS = ("padding", "random", "tree")
# The baselines of a case. They run on the same device, in the same rounds.
BASELINES = {
    "plain": "the same case without options, pages and window",
    "full": "plain, with the full mask",
    "causal": "plain, with the causal mask",
    "varlen": "the documents as sequences of a varlen call",
    "wide": "plain, with 8-bit k and v in q's dtype",
}


@dataclass(frozen=True)
class CaseOptions:
    """Options of attention(). Masks, biases and slopes are random, never zeros."""

    mask: str = ""  # padding [batch, 1, 1, kv_len], random [1, 1, q_len, kv_len], or a tree of tokens
    documents: int = 0  # a block mask of so many documents of equal length
    bias: bool = False  # [1, 1, q_len, kv_len], in q's dtype
    alibi: bool = False
    softcap: float = 0.0
    batch_invariant: bool = False
    f32_out: bool = False
    kernel: str = ""  # an id, or the start of ids if it ends with *

    @classmethod
    def of(cls, given: dict[str, Any]) -> "CaseOptions":
        """Raises ValueError for an unknown name or a value of the wrong type."""
        types: dict[str, type] = {name: type(value) for name, value in asdict(cls()).items()}
        for name, value in given.items():
            if name not in types:
                raise ValueError(f"options: {name} is not one of {', '.join(types)}")
            if type(value) is not types[name] or value == types[name]():
                raise ValueError(f"options: {name} is {value!r}; wanted a {types[name].__name__} "
                                 "other than the default")
        return cls(**given)

    def given(self) -> dict[str, Any]:
        """The options that differ from the defaults."""
        return {name: value for name, value in asdict(self).items() if value}

    def score_options(self) -> list[str]:
        """The options that change the scores."""
        return [name for name in ("mask", "documents", "bias", "alibi", "softcap") if getattr(self, name)]

    def text(self) -> str:
        """The options as words for a row's label. The kernel has its own column."""
        words = [f"{self.mask} mask" if self.mask else "", f"{self.documents} documents" if self.documents else "",
                 "bias" if self.bias else "", "alibi" if self.alibi else "",
                 f"softcap {self.softcap:g}" if self.softcap else "",
                 "batch_invariant" if self.batch_invariant else "", "f32 out" if self.f32_out else ""]
        return " ".join(word for word in words if word)

    def mistake(self, case: Any) -> str | None:
        """A description of the first invalid option of a case; None if all are valid."""
        if self.mask not in ("", *MASKS):
            return f"options: mask is {self.mask!r}; wanted {', '.join(MASKS)}"
        if self.mask == "tree" and (case.causal or case.q_len > case.kv_len):
            return "options: a tree has its own mask; it takes no causal, and kv_len counts its tokens too"
        if self.documents and (not 1 < self.documents <= case.q_len or case.q_len != case.kv_len
                               or case.kv_len % self.documents or self.mask or case.window):
            return ("options: documents are 2 or more of equal length, with q_len equal to kv_len and without "
                    "mask or window")
        if self.softcap < 0:
            return f"options: softcap is {self.softcap:g}; wanted a positive number"
        if self.score_options() and (case.packed or case.used_k):
            return "options: masks, bias and scores are timed without varlen and used_k"
        if case.kind == "bwd" and set(self.given()) - {"kernel"}:
            return "options: gradients are timed with kernel only"
        return None


def baseline_of(case: Any, name: str) -> Any:
    """The case that `name`, a key of BASELINES, describes for a case."""
    plain = replace(case, name=f"{case.name}/{name}", options=CaseOptions(), baselines=(), page_size=0,
                    window=0, requires="")
    if name == "plain":
        return plain
    if name in ("full", "causal"):
        return replace(plain, causal=name == "causal")
    if name == "wide":
        return replace(plain, dtype=case.q_dtype)
    count, length = case.options.documents, case.kv_len // case.options.documents
    sequences = case.batch * count
    return replace(plain, batch=sequences, q_len=length, kv_len=length, packed=(length,) * sequences)


def mistake_of_baselines(case: Any) -> str | None:
    for one in case.baselines:
        name, _, peer = one.partition("@")
        if name not in BASELINES or ("@" in one and not peer):
            return f"baselines: {one!r}; wanted {', '.join(BASELINES)}, or one of them with @ and a peer"
        if name == "varlen" and not case.options.documents:
            return "baselines: varlen is for a case with documents"
        if name == "wide" and "/" not in case.dtype:
            return f"baselines: wide is for a case whose k and v have another dtype than q; this is {case.dtype}"
    return None
