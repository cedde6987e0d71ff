"""Runs the verifier on PyTorch's own attention backends.

    python3 -m flashcore._torch.verify [--device cuda] [--quick] [--backward]

Exits 0 if all backends that can run are correct. A backend that does not support a dtype is reported and
skipped.
"""

import argparse
import json
import sys

from flashcore._verify import verify

_CPU = ("MATH", "FLASH_ATTENTION")
_CUDA = ("MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION")
_DTYPES = ("float32", "float16", "bfloat16")


def _attention(backend):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def attention(q, k, v, *, is_causal=False, scale=None, enable_gqa=False):
        try:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return scaled_dot_product_attention(
                    q, k, v, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
        except RuntimeError as error:
            # torch's messages for a call that a backend does not support.
            if "No available kernel" in str(error) or "No viable backend" in str(error):
                raise NotImplementedError(str(error).splitlines()[0]) from error
            raise

    return attention


def verify_backends(device, quick=False, refused=None, backward=False, seed=1):
    """Yields (name, Report) for each backend and dtype. Names that cannot run go to `refused`. `backward`:
    with the gradients of autograd."""
    for backend in _CUDA if device.startswith("cuda") else _CPU:
        for dtype in _DTYPES:
            name = f"{backend} {dtype}"
            try:
                yield name, verify(_attention(backend), name=name, dtype=dtype, device=device,
                                   framework="torch", quick=quick, backward=backward, seed=seed)
            except (RuntimeError, NotImplementedError, ValueError) as error:
                if "not even a plain call" not in str(error):
                    raise
                if refused is not None:
                    refused.append(name)


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python3 -m flashcore._torch.verify", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--backward", action="store_true", help="also the gradients")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print a final line of JSON")
    options = parser.parse_args(argv)
    refused: list[str] = []
    verdicts = {}
    for name, report in verify_backends(options.device, options.quick, refused, options.backward,
                                        options.seed):
        verdicts[name] = "correct" if report.ok else report.stage
        print(f"{name:<32} {'correct' if report.ok else report.stage}  {report.calls} calls, "
              f"{report.seconds:.1f} s", flush=True)
        if not report.ok:
            print(report)
    for name in refused:
        print(f"{name:<32} does not support a plain call here")
    if options.json:
        print(json.dumps({"verdicts": verdicts, "refused": refused}))
    wrong = [name for name, verdict in verdicts.items() if verdict != "correct"]
    return 0 if verdicts and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
