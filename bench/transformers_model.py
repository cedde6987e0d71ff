"""A model of transformers with FlashCore beside the same model with torch's SDPA.

    PYTHONPATH=python FLASHCORE_LIBRARY=<libflashcore.so> python3 bench/transformers_model.py [--cases train]

A Llama with random weights: 16 layers, 2,048 wide, 32/8 heads of 64. Cases:

train    forward pass, loss, backward pass and an AdamW step, 2 x 2,048 tokens
prefill  forward pass without gradients, 4 x 8,192 tokens
decode   one token each for 4 sequences, with 8,192 in the cache

Both models have the same weights and tokens; the losses of their first step and the logits of their last
position are compared before anything is timed. Every round times both in turn; a figure is the median of the
rounds, a ratio that of SDPA's time over FlashCore's. Python's garbage collector runs between the rounds only, as in
timeit. The bar is for the case "train" on an H200.
"""
import argparse
import gc
import json
import statistics
import time

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import flashcore.integrations.transformers

NAMES = ("sdpa", "flashcore")
SIZES = {"train": (2, 2048), "prefill": (4, 8192), "decode": (4, 8192)}  # batch, tokens
BARS = {"train": 1.0}  # wanted ratio
TOLERANCE = 0.02  # between the models, relative to the norm; both compute in bf16
DECODE_TOKENS = 8  # in a round


def make_models(args, device):
    models = {}
    for name in NAMES:
        config = LlamaConfig(hidden_size=args.width, intermediate_size=4 * args.width, num_hidden_layers=args.layers,
                             num_attention_heads=args.heads[0], num_key_value_heads=args.heads[1],
                             vocab_size=args.vocabulary, max_position_embeddings=65536)
        torch.manual_seed(0)
        with device:
            models[name] = LlamaForCausalLM._from_config(config, attn_implementation=name, dtype=torch.bfloat16)
    used = [model.config._attn_implementation for model in models.values()]
    if used[0] != "sdpa" or used[1] == "sdpa":
        raise AssertionError(f"the models use {' and '.join(used)}")
    return models


class Train:
    def __init__(self, model, tokens):
        self.model, self.tokens = model.train(), tokens
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=tokens.is_cuda)

    def run(self):
        loss = self.model(self.tokens, labels=self.tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class Prefill:
    def __init__(self, model, tokens):
        self.model, self.tokens = model.eval(), tokens

    @torch.no_grad()
    def run(self):
        return self.model(self.tokens, use_cache=False, logits_to_keep=1).logits


class Decode:
    def __init__(self, model, tokens):
        self.model, self.tokens = model.eval(), tokens
        with torch.no_grad():
            self.cache = DynamicCache(config=model.config)
            model(tokens, past_key_values=self.cache, logits_to_keep=1)

    @torch.no_grad()
    def run(self):
        token = self.tokens[:, :1]
        for _ in range(DECODE_TOKENS):
            logits = self.model(token, past_key_values=self.cache).logits
        self.cache.crop(-DECODE_TOKENS)
        return logits


CASES = {"train": Train, "prefill": Prefill, "decode": Decode}
STEPS = {"train": 1, "prefill": 1, "decode": DECODE_TOKENS}  # in a run


def seconds(run, device):
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def compare(found):
    """The norm of the difference of the first results, relative to the norm of SDPA's."""
    wanted, got = (found[name].float() for name in NAMES)
    difference = float((got - wanted).norm() / wanted.norm())
    if not difference <= TOLERANCE:
        raise SystemExit(f"the results differ by {difference:.3g} of their norm, more than {TOLERANCE}")
    return difference


def measure(name, models, args, device):
    """The figures of a case, as a dict."""
    batch, length = args.size or SIZES[name]
    torch.manual_seed(1)
    tokens = torch.randint(args.vocabulary, (batch, length), device=device)
    cases = {which: CASES[name](model, tokens) for which, model in models.items()}
    difference = compare({which: case.run() for which, case in cases.items()})
    for case in cases.values():
        case.run()
    rounds = []
    gc.disable()
    for number in range(args.rounds):
        gc.collect()
        order = NAMES if number % 2 == 0 else NAMES[::-1]
        rounds.append({which: seconds(cases[which].run, device) for which in order})
    gc.enable()
    times = {which: statistics.median(one[which] for one in rounds) / STEPS[name] for which in NAMES}
    ratios = [one["sdpa"] / one["flashcore"] for one in rounds]
    return dict(case=name, batch=batch, tokens=length, difference=difference, sdpa_s=times["sdpa"],
                flashcore_s=times["flashcore"], ratio=statistics.median(ratios), lowest=min(ratios),
                highest=max(ratios), bar=BARS.get(name))


def line(one):
    bar = "" if one["bar"] is None else f", bar {one['bar']:.2f}"
    return (f"{one['case']:8} {one['batch']} x {one['tokens']:6,}: sdpa {one['sdpa_s'] * 1e3:9.2f} ms, flashcore "
            f"{one['flashcore_s'] * 1e3:9.2f} ms, ratio {one['ratio']:.3f} ({one['lowest']:.3f} to "
            f"{one['highest']:.3f}){bar}; results differ by {one['difference']:.2g}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=CASES)
    parser.add_argument("--size", type=int, nargs=2, metavar=("BATCH", "TOKENS"), help="instead of each case's own")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], help="query and KV heads")
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    args = parser.parse_args()
    flashcore.integrations.transformers.register()
    device = torch.device(args.device)
    models = make_models(args, device)
    found = []
    for name in args.cases:
        found.append(measure(name, models, args, device))
        if not args.json:
            print(line(found[-1]), flush=True)
    if args.json:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
