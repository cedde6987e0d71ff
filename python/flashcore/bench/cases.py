"""The cases of bench/cases.json, and their selection."""

import json
from dataclasses import dataclass, replace

from flashcore._core import abi
from flashcore.bench.options import CaseOptions, mistake_of_baselines

FIELDS = ("kind", "name", "dtype", "batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim",
          "causal", "cold_l2", "suite")
# Optional fields and their defaults. used_k: keys in use per sequence (kv_len is then the capacity).
# packed: varlen lengths (q_len and kv_len are then the longest). page_size: keys per page. window: keys
# before its own position that a query sees, with causal. v_dim: if it differs from head_dim. requires:
# a feature that the library must have. options: CaseOptions. baselines: what it is compared with
# (options.BASELINES), alone or, after an @, as a peer computes it.
OPTIONAL_FIELDS = {"used_k": (), "packed": (), "page_size": 0, "window": 0, "v_dim": 0,
                   "requires": "", "options": CaseOptions(), "baselines": ()}
KINDS = ("fwd", "bwd")
_LISTS = ("used_k", "packed", "baselines")
_TYPES: dict[str, type] = dict.fromkeys(FIELDS, int)
_TYPES.update(kind=str, name=str, dtype=str, suite=str, causal=bool, cold_l2=bool)
_ELEMENT_BYTES = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2, "e4m3": 1, "int8": 1}


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
    used_k: tuple[int, ...] = ()
    packed: tuple[int, ...] = ()
    page_size: int = 0
    window: int = 0
    v_dim: int = 0
    requires: str = ""
    options: CaseOptions = CaseOptions()
    baselines: tuple[str, ...] = ()

    @classmethod
    def of(cls, row):
        """The case of a row of the cases file or of a result file."""
        given = {name: row[name] for name in FIELDS}
        given.update({name: row.get(name, absent) for name, absent in OPTIONAL_FIELDS.items()})
        given["options"] = CaseOptions.of(row.get("options", {}))
        return cls(**{**given, **{name: tuple(given[name]) for name in _LISTS}})

    def fields(self):
        """The case exactly as in the file."""
        given = {name: getattr(self, name) for name in FIELDS}
        for name, absent in OPTIONAL_FIELDS.items():
            if getattr(self, name) != absent:
                given[name] = getattr(self, name)
        if "options" in given:
            given["options"] = self.options.given()
        return {name: list(one) if name in _LISTS else one for name, one in given.items()}

    @property
    def q_dtype(self):
        return self.dtype.split("/")[0]

    @property
    def kv_dtype(self):
        """The dtype after the slash, if there is one; otherwise q's."""
        return self.dtype.split("/")[-1]

    @property
    def out_dtype(self):
        """q's dtype; f16 if q is 8-bit; f32 with that option."""
        if self.options.f32_out:
            return "f32"
        return "f16" if self.q_dtype == "e4m3" else self.q_dtype

    @property
    def eight_bit(self):
        return "e4m3" in self.dtype or "int8" in self.dtype

    def shape_text(self):
        heads = str(self.q_heads) if self.q_heads == self.kv_heads else \
            f"{self.q_heads}/{self.kv_heads}"
        length = str(self.q_len) if self.q_len == self.kv_len else f"{self.q_len}x{self.kv_len}"
        dim = f"{self.head_dim}/{self.v_dim}" if self.v_dim else str(self.head_dim)
        return f"{self.batch},{heads},{length},{dim} {self.dtype}" + \
            (" causal" if self.causal else "") + \
            (f" window {self.window}" if self.window else "") + \
            (f" pages of {self.page_size}" if self.page_size else "") + \
            (" ragged" if self.used_k else "") + (" packed" if self.packed else "") + \
            (f" {self.options.text()}" if self.options.text() else "")

    def lengths(self):
        """The number of keys of each sequence."""
        return self.used_k or self.packed or (self.kv_len,) * self.batch

    def q_lengths(self):
        """The number of queries of each sequence."""
        return self.packed or (self.q_len,) * self.batch

    @property
    def value_dim(self):
        return self.v_dim or self.head_dim

    def _shape(self, heads, length, dim):
        return (sum(self.packed), heads, dim) if self.packed else (self.batch, heads, length, dim)

    @property
    def q_shape(self):
        return self._shape(self.q_heads, self.q_len, self.head_dim)

    @property
    def k_shape(self):
        return self._shape(self.kv_heads, self.kv_len, self.head_dim)

    @property
    def v_shape(self):
        return self._shape(self.kv_heads, self.kv_len, self.value_dim)

    @property
    def out_shape(self):
        return self._shape(self.q_heads, self.q_len, self.value_dim)

    @property
    def lse_shape(self):
        return (self.q_heads, sum(self.packed)) if self.packed else self.q_shape[:3]

    def _position(self, b, i):
        """The key position of query i of sequence b. Causal is aligned bottom-right: the last query is
        at the last key."""
        return i + self.lengths()[b] - self.q_lengths()[b]

    def _document(self, b, i):
        """(begin, end) of the keys of the document of query i."""
        length = self.kv_len // self.options.documents
        begin = self._position(b, i) // length * length
        return begin, begin + length

    def visible_end(self, b, i):
        """The end of the keys that query i of sequence b sees. A mask may hide some of them."""
        length = self.lengths()[b]
        if self.options.documents:
            length = self._document(b, i)[1]
        return min(max(self._position(b, i) + 1, 0), length) if self.causal else length

    def visible_begin(self, b, i):
        """The first key that query i of sequence b sees."""
        if self.options.documents:
            return self._document(b, i)[0]
        return max(self._position(b, i) - self.window, 0) if self.window else 0

    def visible_pairs(self):
        """The number of visible (query, key) pairs per head, over all sequences. Keys under a mask count."""
        pairs = {}
        for b, length in enumerate(self.lengths()):
            if length not in pairs:
                pairs[length] = sum(max(self.visible_end(b, i) - self.visible_begin(b, i), 0)
                                    for i in range(self.q_lengths()[b]))
        return sum(pairs[length] for length in self.lengths())

    def flops(self):
        """Of the two products of a forward call. Gradients have five: three of head_dim, two of v_dim."""
        dims = self.head_dim + self.value_dim if self.kind == "fwd" else \
            3 * self.head_dim + 2 * self.value_dim
        return 2.0 * self.q_heads * self.visible_pairs() * dims

    def kv_bytes(self):
        """Bytes of the keys and values in use."""
        return (self.kv_heads * sum(self.lengths()) * (self.head_dim + self.value_dim)
                * _ELEMENT_BYTES[self.kv_dtype])

    def input_bytes(self):
        q_rows = self.q_heads * sum(self.q_lengths())
        return self.kv_bytes() + q_rows * self.head_dim * _ELEMENT_BYTES[self.q_dtype]

    def output_bytes(self):
        rows = self.q_heads * sum(self.q_lengths())
        return rows * self.value_dim * _ELEMENT_BYTES[self.out_dtype]

    def unsupported(self, device):
        """The reason why FlashCore cannot run this case on a device; None if it can."""
        if self.kind not in KINDS:
            return f"kind is {self.kind}; wanted {' or '.join(KINDS)}"
        if self.kind == "bwd" and (self.eight_bit or self.used_k or self.packed or self.page_size):
            return "gradients are timed without 8-bit types, lengths, varlen and pages"
        if any(one not in _ELEMENT_BYTES for one in self.dtype.split("/")) or \
                ("e4m3" in self.dtype and device == "cpu"):
            return f"dtype is {self.dtype}: timed by flashcore bench"
        if self.eight_bit and (self.used_k or self.packed or self.page_size):
            return "8-bit keys are timed without lengths, varlen and pages only"
        if self.dtype == "f64" and device == "cuda":
            return "f64 runs on the CPU only"
        if self.requires == "pages" and not hasattr(abi.Params, "block_table"):
            return "needs pages, which this library does not have"
        return None

    def needs_torch(self):
        """Whether only torch can make its inputs. Without torch, a CPU runs plain cases."""
        return bool(self.kind == "bwd" or self.eight_bit or self.used_k or self.packed or self.page_size or self.window
                    or self.v_dim or self.options.given() or self.baselines)

    def shrunk(self, longest):
        """The same case with at most `longest` queries and keys, two sequences and two KV heads, for a
        trial of the benchmark."""
        scale = max(-(-max(self.q_len, self.kv_len) // longest), 1)
        unit = max(self.page_size, self.options.documents, 1)
        kv_len = max(self.kv_len // scale // unit, 1) * unit
        q_len = kv_len if self.q_len == self.kv_len else min(self.q_len, max(self.q_len // scale, 16), kv_len)
        batch, kv_heads = min(self.batch, 2), min(self.kv_heads, 2)
        small = replace(self, batch=batch, kv_heads=kv_heads, q_heads=self.q_heads // self.kv_heads * kv_heads,
                        q_len=q_len, kv_len=kv_len, window=self.window and max(self.window // scale, 1),
                        used_k=tuple(min(one, kv_len) for one in self.used_k[:batch]),
                        packed=tuple(max(one // scale, 1) for one in self.packed[:batch]))
        if self.packed:
            small = replace(small, q_len=max(small.packed), kv_len=max(small.packed))
        return small

    def mistake(self):
        """A description of the first invalid optional field; None if all are valid."""
        if self.used_k and (len(self.used_k) != self.batch or not all(
                type(one) is int and 0 <= one <= self.kv_len for one in self.used_k)):
            return f"used_k: wanted {self.batch} lengths between 0 and {self.kv_len}"
        if self.packed and (len(self.packed) != self.batch or self.used_k or self.page_size or not all(
                type(one) is int and one > 0 for one in self.packed)
                or not self.q_len == self.kv_len == max(self.packed)):
            return (f"packed: wanted {self.batch} lengths, q_len and kv_len the longest of them, "
                    "and neither used_k nor pages")
        for name in ("window", "v_dim"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 0:
                return f"{name} is {getattr(self, name)!r}; wanted a number of 0 or more"
        if self.window and not self.causal:
            return "window: it covers keys before the query; it needs causal"
        if type(self.page_size) is not int or self.page_size < 0 or (
                self.page_size and self.kv_len % self.page_size):
            return f"page_size is {self.page_size!r}; wanted a divisor of kv_len"
        if self.requires not in ("", "pages"):
            return f"requires is {self.requires!r}; wanted \"pages\""
        return self.options.mistake(self) or mistake_of_baselines(self)


def parse(text, where):
    """Parses the text of a cases file: a list, or an object with a list under "cases"."""
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
        try:
            cases.append(Case.of(row))
        except ValueError as error:
            raise ValueError(f"{where}: case {number}: {error}") from None
        problem = cases[-1].mistake()
        if problem is not None:
            raise ValueError(f"{where}: case {number}: {problem}")
    return cases


def load(path):
    with open(path, encoding="utf-8") as file:
        return parse(file.read(), str(path))


def current_suite(name):
    """Maps the old name of a suite to the current one; "lineage" is the old name of "regression"."""
    return "regression" if name == "lineage" else name


def select(cases, device, suites=(), names=()):
    """The cases with these suites and names. Default: suite "cpu" on a CPU, all other suites on a GPU.
    An unknown name raises an error that lists the known names."""
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
