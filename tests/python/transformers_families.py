"""Every family of transformers under attn_implementation="flashcore", against "eager" and "sdpa".

    python3 tests/python/transformers_families.py --all --table docs/transformers.md
    python3 tests/python/transformers_families.py llama gpt_oss t5      # some, as text

Each family is built at tiny size with random weights. The columns of the table:
  plain, left, right   logits without padding, with padding on one side
  packed               sequences in one row with cu_seq_lens, against each sequence alone
  grad                 gradients of all weights, with padding
  cache, no cache, static   logits of each step of greedy generation
  bf16                 logits in bfloat16 against eager's in float32; at most twice eager's own error
"sdpa": sdpa differs from eager as much as FlashCore does. "-": eager does not support it. Exits 1 if a
family is wrong."""

import argparse
import collections
import dataclasses
import multiprocessing
import os
import sys
import textwrap
import time
import warnings

FOLDER = os.path.dirname(os.path.abspath(__file__))
TREE = os.path.dirname(os.path.dirname(FOLDER))
for one in (os.path.join(TREE, "python"), FOLDER):
    if one not in sys.path:
        sys.path.insert(0, one)

import tiny_models  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

from flashcore.compat import flash_attn  # noqa: E402
from flashcore.integrations import transformers as integration  # noqa: E402

TOLERANCE = 2e-4  # relative to the largest value, in float32
ROUNDING = 1e-3  # limit for models that repeat their layers, if sdpa has such an error too
LENGTH, PADDING, STEPS = 19, 4, 6
COLUMNS = ("plain", "left", "right", "packed", "grad", "cache", "no cache", "static", "bf16")
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"


@dataclasses.dataclass
class Result:
    kind: str
    name: str
    verdict: str = ""  # right, wrong, refused, not built, no attention
    why: str = ""
    cells: dict = dataclasses.field(default_factory=dict)
    calls: int = 0
    served_as: str = ""
    seconds: float = 0.0


class Calls:
    """Counts calls of FlashCore."""

    def __init__(self):
        self.count, self.packed = 0, False
        for module in (integration, flash_attn):
            setattr(module, "attention", self.counted(module.attention))
        setattr(integration, "to_rows", self.counted(integration.to_rows))

    def counted(self, attention):
        def call(*arguments, **options):
            made = attention(*arguments, **options)
            self.count += made is not None  # None: another function computes it
            return made
        return call


class Family:
    """One family: its models under each implementation, its inputs and its checks."""

    def __init__(self, kind, name, device):
        self.device, self.listed = device, kind
        self.config = tiny_models.tiny_config(name)
        self.eager = tiny_models.build(kind, self.config, "eager").to(device)
        # transformers lists audio decoders among the encoder-decoders.
        self.kind = "causal" if kind == "seq2seq" and not self.config.is_encoder_decoder else kind
        if sum(one.numel() for one in self.eager.parameters()) > 50e6:
            raise ValueError("more than 50 million weights at tiny size")
        generator = torch.Generator().manual_seed(2)
        self.tokens = torch.randint(4, tiny_models.VOCABULARY, (2, LENGTH), generator=generator).to(device)
        size = getattr(self.config, "image_size", tiny_models.IMAGE)
        size = size if isinstance(size, (list, tuple)) else (size, size)
        self.image = torch.randn(2, getattr(self.config, "num_channels", 3), *size,
                                 generator=generator).to(device)

    def model(self, implementation):
        return tiny_models.build(self.listed, self.config, implementation,
                                 self.eager.state_dict()).to(self.device)

    def mask(self, side):
        made = torch.ones_like(self.tokens)
        if side == "left":
            made[1, :PADDING] = 0
        elif side == "right":
            made[1, -PADDING:] = 0
        return made

    def inputs(self, side=None):
        if self.kind == "vision":
            return {"pixel_values": self.image}
        made = {"input_ids": self.tokens}
        if side is not None:
            made["attention_mask"] = self.mask(side)
        if self.kind == "seq2seq":
            made["decoder_input_ids"] = self.tokens[:, :LENGTH - 6]
        return made

    def logits(self, model, side=None):
        out = model(**self.inputs(side)).logits
        if side is not None and self.kind in ("causal", "encoder") and out.shape[1] == LENGTH:
            out = out[self.mask(side).bool()]  # logits of padding are undefined
        return out

    def gradients(self, model):
        side = None if self.kind == "vision" else "left"
        model.zero_grad(set_to_none=True)
        logits = self.logits(model, side)
        weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3)).to(logits)
        (logits * weights).sum().backward()
        found = {name: one.grad.detach().clone() for name, one in model.named_parameters()
                 if one.grad is not None}
        model.zero_grad(set_to_none=True)
        return found

    def start(self):
        return {"decoder_start_token_id": 1} if self.kind == "seq2seq" else {}

    def generated(self, model, **options):
        length = 8  # less than window plus steps
        inputs = {"input_ids": self.tokens[:, :length], "attention_mask": self.mask("left")[:, :length]}
        made = model.generate(**inputs, max_new_tokens=STEPS + 4, min_new_tokens=STEPS + 4, do_sample=False,
                              num_beams=1, return_dict_in_generate=True, output_logits=True,
                              disable_compile=True, **self.start(), **options)
        return made.sequences, torch.stack(made.logits).float()

    def one_row(self):
        """Both sequences concatenated in one row. Positions start at 0 in each."""
        lengths = (LENGTH, LENGTH - PADDING)
        tokens = torch.cat([self.tokens[row, :length] for row, length in enumerate(lengths)])[None]
        positions = torch.cat([torch.arange(length) for length in lengths])[None].to(self.device)
        return dict(input_ids=tokens, position_ids=positions, use_cache=False)

    def packed(self, model):
        """Logits of both sequences in one row; None if the model does not pass cu_seq_lens on."""
        cu = torch.tensor([0, LENGTH, 2 * LENGTH - PADDING], dtype=torch.int32, device=self.device)
        seen = []
        original = integration._varlen, integration._varlen_mask
        integration._varlen = lambda *args: seen.append(1) or original[0](*args)
        integration._varlen_mask = lambda *args: seen.append(1) or original[1](*args)
        try:
            out = model(**self.one_row(), cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=LENGTH,
                        max_length_k=LENGTH).logits[0]
        finally:
            integration._varlen, integration._varlen_mask = original
        return out if seen else None

    def alone(self, model, counted=False):
        lengths = enumerate((LENGTH, LENGTH - PADDING))
        return torch.cat([model(input_ids=self.tokens[row:row + 1, :length],
                                **({"position_ids": torch.arange(length, device=self.device)[None]}
                                   if counted else {})).logits[0] for row, length in lengths])

    def counted(self, model):
        """alone() with explicit positions, for models whose positions do not start at 0."""
        return self.alone(model, counted=True)

    def is_causal(self):
        """True if later tokens have no effect. A decoder class may contain an encoder."""
        whole, part = (self.eager(input_ids=one).logits[:, :5] for one in (self.tokens, self.tokens[:, :5]))
        return error(part, whole) <= TOLERANCE

    def masked(self, model):
        """One row with a mask that separates the sequences, for models that continue to count positions."""
        inputs = self.one_row()
        length = inputs["input_ids"].shape[1]
        row = torch.arange(length, device=self.device)
        keep = (row < LENGTH)[:, None] == (row < LENGTH)[None]
        if self.is_causal():
            keep &= row[:, None] >= row[None]
        mask = torch.where(keep, 0.0, torch.finfo(torch.float32).min)[None, None]
        return model(**inputs, attention_mask=mask).logits[0]

    def by_positions(self, model):
        """One row under eager, for models with layers that mix adjacent sequences."""
        if not self.is_causal():
            return torch.zeros(())
        return model(**self.one_row()).logits[0]


def error(got, want):
    """The largest difference relative to the largest value."""
    got, want = got.float(), want.float()
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    return float((got - want).abs().max() / want.abs().max().clamp_min(1e-30))


def mean_error(got, want):
    """The relative Euclidean error. A different router decision in one row does not dominate it."""
    return float((got.float() - want).norm() / want.norm())


def gradient_error(got, want):
    if got.keys() != want.keys():
        return float("inf")
    names = [name for name, one in want.items() if one.numel()]
    scale = max(float(want[name].abs().max()) for name in names)
    if not all(bool(torch.isfinite(one).all()) for one in got.values()):
        return float("inf")
    return max(float((got[name] - want[name]).abs().max()) for name in names) / max(scale, 1e-30)


def generation_error(got, want):
    """The error of the logits up to the first different token, which only a tie may cause."""
    steps = want[1].shape[0]
    start = want[0].shape[1] - steps
    same = (got[0] == want[0]).all(0)[start:].long().cumprod(0).sum()
    return error(got[1][:int(same) + 1], want[1][:int(same) + 1])


def _checks(family):
    """{column: (function of a model, error function of its result)}."""
    checks = {"plain": (lambda model: family.logits(model), error)}
    if family.kind != "vision":
        for side in ("left", "right"):
            checks[side] = (lambda model, side=side: family.logits(model, side), error)
    checks["grad"] = (family.gradients, gradient_error)
    if family.kind in ("causal", "seq2seq"):
        for column, options in (("cache", {}), ("no cache", {"use_cache": False}),
                                ("static", {"cache_implementation": "static"})):
            checks[column] = (lambda model, options=options: family.generated(model, **options),
                              generation_error)
    return checks


def _run(function, model, gradients=False):
    with torch.set_grad_enabled(gradients), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(4)  # some models draw random hashes
        return function(model)


def _bf16(family, ours, want):
    """Our error in bfloat16 divided by its limit; None if eager does not support bfloat16. A different
    router decision, in FlashCore or in eager, dominates the error, so more inputs are drawn then."""
    tokens, made, theirs = family.tokens, 0.0, 0.0
    try:
        for draw in range(8):
            if draw:
                family.tokens = tokens.flatten()[torch.randperm(
                    tokens.numel(), generator=torch.Generator().manual_seed(draw))].view(tokens.shape)
                want = _run(family.logits, family.eager.float())
            try:
                theirs += mean_error(_run(family.logits, family.eager.to(torch.bfloat16)), want)
            except Exception:
                return None
            made += mean_error(_run(family.logits, ours.to(torch.bfloat16)), want)
            if draw == 0 and made <= max(2 * theirs, 1e-2):
                break
    finally:
        family.tokens = tokens
        family.eager.float()
    return made / max(2 * theirs, 1e-2)


def examine(kind, name, device="cpu"):
    """The Result of one family."""
    result, start = Result(kind, name), time.monotonic()
    calls = examine.calls = getattr(examine, "calls", None) or Calls()
    transformers.logging.set_verbosity_error()
    integration.register()
    try:
        family = Family(kind, name, device)
        plain = _run(family.logits, family.eager)
        if not bool(torch.isfinite(plain).all()):
            raise ValueError("eager's logits are not finite")
    except Exception as failure:
        result.verdict, result.why = "not built", _short(failure)
        return result
    ours = None
    for asked in (integration.NAME, integration.PLAIN_NAME):
        try:
            ours = family.model(asked)
            break
        except (ValueError, NotImplementedError) as failure:
            result.verdict, result.why = "refused", result.why or _short(failure)
    if ours is None:
        return result
    result.served_as = ours.config._attn_implementation + (" only" if result.why else "")
    try:
        other = family.model("sdpa")
    except (ValueError, ImportError, KeyError):
        other = None
    before = calls.count
    for column, (function, difference) in _checks(family).items():
        _one_check(result, column, function, difference, family.eager, ours, other, family.generated)
    if family.kind in ("causal", "encoder"):
        _packed_check(result, family, ours)
    try:
        off = _bf16(family, ours, plain)
        result.cells["bf16"] = ("-" if off is None else "yes" if off <= 1
                                else f"wrong ({off:.2g} times what it may be)")
    except Exception as failure:
        result.cells["bf16"] = _word(failure)
    result.calls = calls.count - before
    _judge(result)
    result.seconds = time.monotonic() - start
    return result


def _off_for_other_inputs(function, difference, eager, ours):
    """The error of the gradients for other inputs. A ReLU whose input is 0 up to rounding may switch for some
    tokens, which changes gradients a lot, but not for these inputs too."""
    family = function.__self__
    tokens, image = family.tokens, family.image
    family.tokens, family.image = tokens.flip(1), image.flip(-1)
    try:
        return difference(_run(function, ours, True), _run(function, eager, True))
    finally:
        family.tokens, family.image = tokens, image


def _one_check(result, column, function, difference, eager, ours, other, dynamic):
    gradients = column == "grad"
    try:
        want = _run(function, eager, gradients)
        if difference(want, want) != 0.0:
            raise ValueError("eager's result is not finite")
    except Exception as failure:
        if os.environ.get("WHY"):
            print(f"{result.name}, {column}: eager: {_short(failure)}", flush=True)
        result.cells[column] = "-"
        return
    try:
        off = difference(_run(function, ours, gradients), want)
    except Exception as failure:
        result.cells[column] = _word(failure)
        return
    if off > TOLERANCE and column == "static":  # eager is wrong there for some models: compare with a dynamic cache
        off = difference(_run(function, ours), _run(dynamic, eager))
    if off > TOLERANCE and gradients:
        off = _off_for_other_inputs(function, difference, eager, ours)
    if off <= TOLERANCE:
        result.cells[column] = "yes"
        return
    result.cells[column] = f"wrong ({off:.1e})"
    if other is None:
        return
    try:
        theirs = _run(function, other, gradients)
    except Exception:
        return
    away = difference(theirs, want)
    result.cells[column] = f"wrong ({off:.1e}, sdpa {away:.1e})"
    rounding = away <= ROUNDING and off <= 2 * away
    if rounding or difference(_run(function, ours, gradients), theirs) <= TOLERANCE:
        result.cells[column] = "sdpa"


def _packed_check(result, family, ours):
    try:
        want = _run(family.alone, family.eager)
        got = _run(family.packed, ours)
    except NotImplementedError as failure:
        result.cells["packed"] = _word(failure)
        return
    except (TypeError, IndexError, AttributeError, ValueError, RuntimeError):
        got = None  # the model does not accept these arguments
    if got is None:
        result.cells["packed"] = "-"
    else:
        off = error(got, want)
        limit = ROUNDING if result.cells.get("plain") == "sdpa" else TOLERANCE
        for other in (family.counted, family.masked, family.by_positions):
            if off > limit:
                try:
                    off = min(off, error(got, _run(other, family.eager)))
                except Exception:  # the model does not support this mask
                    pass
        result.cells["packed"] = "yes" if off <= limit else f"wrong ({off:.1e})"


def _word(failure):
    """A refusal is an exception that FlashCore raised on purpose."""
    kind = "refused" if isinstance(failure, NotImplementedError) else "fails"
    return f"{kind}: {_short(failure)}"


def _short(failure):
    text = " ".join(f"{type(failure).__name__}: {failure}".split()).replace("|", "/")
    return text if len(text) <= 200 else text[:197] + "..."


def _judge(result):
    cells = result.cells.values()
    if any(one.startswith(("wrong", "fails")) for one in cells):
        result.verdict = "wrong"
    elif not result.calls:
        result.verdict = "no attention"
    elif any(one.startswith("refused") for one in cells):
        result.verdict = "right, with refusals"
    else:
        result.verdict = "right"


# ---------------------------------------------------------------- the table

def table(results, device):
    """Markdown text: counts, families, refusals, and families that could not be built."""
    counts = collections.Counter(one.verdict for one in results)
    words = ", ".join(f"{counts[name]} {name}" for name in
                      ("right", "right, with refusals", "wrong", "refused", "no attention", "not built")
                      if counts[name])
    lines = [f"transformers {transformers.__version__}, torch {torch.__version__}, {device}: "
             f"{len(results)} families: {words}.", "",
             "| family | kind | served as | " + " | ".join(COLUMNS) + " |", "|-" * (len(COLUMNS) + 3) + "|"]
    notes = []
    for one in results:
        if not one.cells or one.verdict == "no attention":
            continue
        row = []
        for column in COLUMNS:
            cell = one.cells.get(column, "")
            if ":" in cell or "(" in cell:
                notes.append(f"- {one.name}, {column}: {cell}")
                cell = f"**{cell.split(' ')[0].rstrip(':')}**"
            row.append(cell)
        lines.append(f"| {one.name} | {one.kind} | {one.served_as} | " + " | ".join(row) + " |")
    for title, wanted in (("Refused", "refused"),
                          ("No attention that FlashCore could compute", "no attention"),
                          ("Not built at tiny size, so not tested", "not built")):
        chosen = [one for one in results if one.verdict == wanted]
        if chosen:
            lines += ["", f"{title} ({len(chosen)}):", ""]
            lines += [f"- {one.name} ({one.kind})" + (f": {one.why}" if one.why else "") for one in chosen]
    if notes:
        lines += ["", "Cells in bold:", "", *notes]
    return "\n".join(_wrapped(line) for line in lines) + "\n"


def _wrapped(line):
    """The line wrapped at 120 characters, the limit of documents outside tables."""
    if line.startswith("|"):
        return line
    return textwrap.fill(line, 120, subsequent_indent="  " if line.startswith("- ") else "",
                         break_long_words=False, break_on_hyphens=False)


def write_table(path, text):
    """Writes the text between BEGIN and END of the file, or at its end."""
    whole = open(path, encoding="utf-8").read() if os.path.exists(path) else ""
    head, _, rest = whole.partition(BEGIN)
    tail = rest.partition(END)[2] if rest else "\n"
    with open(path, "w", encoding="utf-8") as file:
        file.write(f"{head}{BEGIN}\n{text}{END}{tail}")


def _job(arguments):
    torch.set_num_threads(1)
    try:
        return examine(*arguments)
    except Exception as failure:  # the run continues with the other families
        return Result(*arguments[:2], verdict="wrong", why=_short(failure))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", help="model types of transformers")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--table", help="the Markdown file to write the table into")
    options = parser.parse_args()
    known = tiny_models.families()
    chosen = [one for one in known if options.all or one[1] in options.names]
    unknown = set(options.names) - {name for _, name in known}
    if unknown or not chosen:
        parser.error(f"no such family: {', '.join(sorted(unknown)) or 'none is named'}")
    results = []
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=40) as pool:
        for one in pool.imap(_job, [(*family, options.device) for family in chosen]):
            results.append(one)
            if options.table:  # written after each family, so that an interrupted run keeps its results
                write_table(options.table, table(results, options.device))
            says = "".join(f"\n    {column}: {cell}" for column, cell in one.cells.items()
                           if cell not in ("yes", "-"))
            print(f"{one.kind} {one.name}: {one.verdict} {one.why}{says}  [{one.seconds:.1f} s]", flush=True)
    if not options.table:
        print(table(results, options.device))
    return 1 if any(one.verdict == "wrong" for one in results) else 0


if __name__ == "__main__":
    sys.exit(main())
