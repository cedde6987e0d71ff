"""The benchmark's cases: what bench/cases.json holds, and which of them to run."""

import json
from dataclasses import dataclass

FIELDS = ("kind", "name", "dtype", "batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim",
          "causal", "cold_l2", "suite")
_TYPES = dict.fromkeys(FIELDS, int)
_TYPES.update(kind=str, name=str, dtype=str, suite=str, causal=bool, cold_l2=bool)
_ELEMENT_BYTES = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2}


@dataclass(frozen=True)
class Case:
    kind: str
    name: str
    dtype: str
    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    causal: bool
    cold_l2: bool
    suite: str

    def fields(self):
        """The case exactly as it stands in the file."""
        return {name: getattr(self, name) for name in FIELDS}

    def shape_text(self):
        heads = str(self.q_heads) if self.q_heads == self.kv_heads else \
            f"{self.q_heads}/{self.kv_heads}"
        length = str(self.q_len) if self.q_len == self.kv_len else f"{self.q_len}x{self.kv_len}"
        return f"{self.batch},{heads},{length},{self.head_dim} {self.dtype}" + \
            (" causal" if self.causal else "")

    @property
    def q_shape(self):
        return (self.batch, self.q_heads, self.q_len, self.head_dim)

    @property
    def kv_shape(self):
        return (self.batch, self.kv_heads, self.kv_len, self.head_dim)

    def visible_pairs(self):
        """(query, key) pairs per head. Causal is bottom-right: query i sees i + kv_len - q_len."""
        if not self.causal:
            return self.q_len * self.kv_len
        offset = self.kv_len - self.q_len
        return sum(min(max(i + offset + 1, 0), self.kv_len) for i in range(self.q_len))

    def flops(self):
        return 4.0 * self.batch * self.q_heads * self.visible_pairs() * self.head_dim

    def input_bytes(self):
        rows = self.q_heads * self.q_len + 2 * self.kv_heads * self.kv_len
        return self.batch * rows * self.head_dim * _ELEMENT_BYTES[self.dtype]

    def unsupported(self, device):
        """Why FlashCore cannot run this case there; None where it can."""
        if self.kind != "fwd":
            return f"kind is {self.kind}; only forward attention is built"
        if self.dtype not in _ELEMENT_BYTES:
            return f"dtype is {self.dtype}; 8-bit attention is not part of this build"
        if self.dtype == "f64" and device == "cuda":
            return "f64 runs on the CPU only"
        return None


def parse(text, where):
    """The cases of a file's text: a list, or an object with a list under "cases"."""
    content = json.loads(text)
    rows = content.get("cases") if isinstance(content, dict) else content
    if not isinstance(rows, list):
        raise ValueError(f"{where}: wanted a list of cases, or an object with one under \"cases\"")
    cases = []
    for number, row in enumerate(rows):
        for name in FIELDS:
            if name not in row:
                raise ValueError(f"{where}: case {number} has no field \"{name}\"")
            if type(row[name]) is not _TYPES[name]:
                raise ValueError(f"{where}: case {number}: {name} is {row[name]!r}; wanted "
                                 f"{_TYPES[name].__name__}")
        cases.append(Case(**{name: row[name] for name in FIELDS}))
    return cases


def load(path):
    with open(path, encoding="utf-8") as file:
        return parse(file.read(), str(path))


def select(cases, device, suites=(), names=()):
    """The cases asked for by suite and name. Neither given: suite "cpu" on a CPU, all others on a
    GPU. An unknown name is an error that lists the known ones."""
    for what, wanted, known in (("suite", suites, {c.suite for c in cases}),
                                ("case", names, {c.name for c in cases})):
        for name in wanted:
            if name not in known:
                raise ValueError(f"{what} is \"{name}\"; known are {', '.join(sorted(known))}")
    chosen = []
    for case in cases:
        if suites and case.suite not in suites:
            continue
        if names and case.name not in names:
            continue
        if not suites and not names and (case.suite == "cpu") != (device == "cpu"):
            continue
        chosen.append(case)
    return chosen
